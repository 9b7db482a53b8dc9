"""From logits to the next token of each row: greedy, filtered random choice, log probabilities.

Pure functions for jit; no state and no random key is carried from step to step. The random draw is
a function of (seed, output_position, token id) alone, so a token does not depend on its row, its
neighbours, the padded batch size, or on preemption.

Order of the filters: suppressed ids, temperature, top_k, top_p, min_p. The order of tokens is
(probability desc, id asc) throughout, so that ties are cut exactly. Dropped tokens are carried as
weight 0. Letters: R rows (padded), V vocabulary, E suppressed ids, k log probabilities.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from paxserve.arrays import SamplingArrays

FAILED = -1  # the token of a row whose logits hold NaN or +inf, or nothing finite
# The working shapes, for short signatures.
Rows = Float32[Array, "R V"]
Mask = Bool[Array, "R V"]
Column = Float32[Array, "R 1"]
IntColumn = Int32[Array, "R 1"]
MaskColumn = Bool[Array, "R 1"]
Bracket = tuple[IntColumn, IntColumn, Column, Column]  # low, high, reach at low, reach at high

_CHUNK = 128
_ROWS_PER_BLOCK = 8
_TINY = 2.0**-126  # the smallest normal float32


def greedy(logits: Float[Array, "R V"]) -> Int32[Array, "R"]:
    """The likeliest token of each row, the lowest id among equals; FAILED for a non-finite row."""
    values = logits.astype(jnp.float32)
    return jnp.where(_is_finite(values), _first_argmax(values), jnp.int32(FAILED))


def sample(logits: Float[Array, "R V"], arrays: SamplingArrays) -> Int32[Array, "R"]:
    """One token for each row, greedy where its temperature is 0; FAILED for a non-finite row.

    Exponential race over the kept tokens: the highest weight / Exp(1) wins with its probability.
    This is Gumbel-max without the second logarithm, so small differences of logits change the
    token only where `perturbed_logits` nearly tie.

    Source: Yellott, "The relationship between Luce's Choice Axiom, Thurstone's Theory, and the
    double exponential distribution", 1977.
    """
    return lax.platform_dependent(logits, arrays, cpu=_sample_in_blocks, default=_sample_rows)


def perturbed_logits(logits: Float[Array, "R V"], arrays: SamplingArrays) -> Float32[Array, "R V"]:
    """Filtered logits / temperature + Gumbel noise, whose argmax `sample` returns; for tests.

    Shifted by a constant per row; -inf where a filter dropped the token. A greedy row holds its
    logits.
    """
    values = _suppress(logits.astype(jnp.float32), arrays.suppressed_ids)
    is_random = _column(arrays.temperature) > 0.0
    return jnp.where(is_random, jnp.log(_race_scores(values, arrays)), values)


def filtered_weights(logits: Float[Array, "R V"], arrays: SamplingArrays) -> Float32[Array, "R V"]:
    """The distribution a random row draws from, unnormalised; 0 where a filter dropped the token.

    The likeliest token weighs 1. Meaningless where the temperature is 0 or the row not finite.
    """
    values = _suppress(logits.astype(jnp.float32), arrays.suppressed_ids)
    return _filtered_weights(values, arrays)


def top_logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, "R"], k: int
) -> tuple[Float32[Array, "R"], Int32[Array, "R"], Int32[Array, "R k"], Float32[Array, "R k"]]:
    """Log probabilities of the chosen and the likeliest tokens, before temperature and filters.

    Float32 log-softmax, whatever the dtype of the logits; suppressed ids are not left out. Beams
    of width w can be ranked from the 2 w likeliest of each: with one end token at most w of the
    best 2 w candidates end a beam. Whoever suppresses ids must ask for as many more.

    Args:
        tokens: The chosen ids. A FAILED row reads id 0; its numbers mean nothing.
        k: How many of the likeliest tokens, at most V; static under jit.

    Returns:
        The chosen token's log probability and its rank from 1, in the order (probability desc,
        id asc); then the k likeliest ids in that order and their log probabilities.
    """
    values = logits.astype(jnp.float32)
    highest = jnp.max(values, axis=-1, keepdims=True)
    log_total = highest + jnp.log(jnp.sum(jnp.exp(values - highest), axis=-1, keepdims=True))
    chosen_id = jnp.maximum(tokens.astype(jnp.int32), jnp.int32(0))[:, None]
    chosen = jnp.take_along_axis(values, chosen_id, axis=-1)
    before = (values > chosen) | ((values == chosen) & (_token_ids(values) < chosen_id))
    rank = 1 + jnp.sum(before, axis=-1, dtype=jnp.int32)
    top_values, top_ids = lax.top_k(values, k)
    return (chosen - log_total)[:, 0], rank, top_ids, top_values - log_total


def _sample_in_blocks(logits: Float[Array, "R V"], arrays: SamplingArrays) -> Int32[Array, "R"]:
    """The same in blocks of rows: what a block needs stays in a CPU's cache; twice as fast."""
    num_rows = logits.shape[0]
    block = math.gcd(num_rows, _ROWS_PER_BLOCK)
    if block == num_rows:
        return _sample_rows(logits, arrays)
    blocks = jax.tree.map(
        lambda array: array.reshape(num_rows // block, block, *array.shape[1:]), (logits, arrays)
    )
    return lax.map(lambda one: _sample_rows(*one), blocks).reshape(num_rows)


def _sample_rows(logits: Float[Array, "R V"], arrays: SamplingArrays) -> Int32[Array, "R"]:
    raw = logits.astype(jnp.float32)
    values = _suppress(raw, arrays.suppressed_ids)
    is_random = _column(arrays.temperature) > 0.0

    def race(values: Rows) -> Rows:
        return jnp.where(is_random, _race_scores(values, arrays), values)

    scores = lax.cond(jnp.any(is_random), race, lambda values: values, values)
    finite = _is_finite(raw) & _is_finite(values)
    return jnp.where(finite, _first_argmax(scores), jnp.int32(FAILED))


def _race_scores(values: Rows, arrays: SamplingArrays) -> Rows:
    noise = _exponential_noise(arrays.seed, arrays.output_position, values.shape[-1])
    return _filtered_weights(values, arrays) / noise


def _filtered_weights(values: Rows, arrays: SamplingArrays) -> Rows:
    temperature, top_p = _column(arrays.temperature), _column(arrays.top_p)
    top_k = _column(arrays.top_k)
    # The difference first: a tiny temperature then gives -inf, never inf - inf.
    below_highest = values - jnp.max(values, axis=-1, keepdims=True)
    is_random = temperature > 0.0
    weights = jnp.exp(below_highest / jnp.where(is_random, temperature, jnp.float32(1)))

    limit_count = is_random & (top_k > 0) & (top_k < values.shape[-1])
    weights = lax.cond(jnp.any(limit_count), _keep_count, _keep_all, weights, top_k, limit_count)
    limit_mass = is_random & (top_p < 1.0)
    weights = lax.cond(jnp.any(limit_mass), _keep_mass, _keep_all, weights, top_p, limit_mass)
    return jnp.where(weights >= _column(arrays.min_p), weights, jnp.float32(0))


def _keep_all(weights: Rows, limit: Array, is_limited: MaskColumn) -> Rows:
    del limit, is_limited
    return weights


def _keep_count(weights: Rows, top_k: IntColumn, is_limited: MaskColumn) -> Rows:
    lowest = jnp.full_like(top_k, _TINY, dtype=jnp.float32)
    return _keep_prefix(weights, top_k.astype(jnp.float32), lowest, is_limited, by_count=True)


def _keep_mass(weights: Rows, top_p: Column, is_limited: MaskColumn) -> Rows:
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # All tokens lighter than this together weigh under half of what top_p may drop.
    lowest = (1.0 - top_p) * total * (0.5 / weights.shape[-1])
    target = jnp.maximum(top_p * total, _TINY)  # at least one token
    return _keep_prefix(weights, target, jnp.maximum(lowest, _TINY), is_limited, by_count=False)


def _keep_prefix(
    weights: Rows, target: Column, lowest: Column, is_limited: MaskColumn, *, by_count: bool
) -> Rows:
    """Zero all but the shortest prefix, in order (weight desc, id asc), that reaches the target.

    No sort: bisection on the bits of the cut, which for floats >= 0 order as the floats do.
    Invariant: reach(low) >= target > reach(high), where reach(c) sums the weights >= c, or counts
    them. It ends when [low, high) holds one token, or tokens of one weight; ids settle the latter.

    Args:
        lowest: A cut that reaches the target; where it does not, all weights >= it are kept.
        is_limited: Rows to filter; others are left as they are.
    """

    def as_cut(bits: IntColumn) -> Column:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def as_bits(cut: Column) -> IntColumn:
        return lax.bitcast_convert_type(cut, jnp.int32)

    def reach(cut: Column) -> Column:
        unit = jnp.ones_like(weights) if by_count else weights
        return jnp.sum(jnp.where(weights >= cut, unit, jnp.float32(0)), axis=-1, keepdims=True)

    def num_between(low: IntColumn, reach_low: Column, reach_high: Column) -> Column:
        return (reach_low - reach_high) / (1.0 if by_count else as_cut(low))

    def is_open(bracket: Bracket) -> MaskColumn:
        low, high, reach_low, reach_high = bracket
        return is_limited & (high - low > 1) & (num_between(low, reach_low, reach_high) > 1.5)

    def halve(bracket: Bracket) -> Bracket:
        low, high, reach_low, reach_high = bracket
        middle = low + (high - low) // 2
        reached = reach(as_cut(middle))
        # A closed row stays as it is, whatever its neighbours still need.
        up = is_open(bracket) & (reached >= target)
        down = is_open(bracket) & (reached < target)
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, reached, reach_low),
            jnp.where(down, reached, reach_high),
        )

    one = jnp.ones_like(target)
    bracket = (as_bits(lowest), as_bits(one) + 1, reach(lowest), jnp.zeros_like(target))
    low, high, reach_low, reach_high = lax.while_loop(
        lambda bracket: jnp.any(is_open(bracket)), halve, bracket
    )
    num_wanted = jnp.ceil(num_between(low, target, reach_high)).astype(jnp.int32)
    kept = jnp.where(is_limited & (weights < as_cut(low)), jnp.float32(0), weights)

    def break_ties(kept: Rows) -> Rows:
        at_cut = is_limited & (kept >= as_cut(low)) & (kept < as_cut(high))
        return jnp.where(at_cut & ~_first_trues(at_cut, num_wanted), jnp.float32(0), kept)

    too_many = num_between(low, reach_low, reach_high) > num_wanted.astype(jnp.float32) + 0.5
    return lax.cond(jnp.any(too_many & is_limited), break_ties, lambda kept: kept, kept)


def _first_trues(mask: Mask, num_wanted: IntColumn) -> Mask:
    """True up to and including the id of each row's num_wanted-th True; all if it has fewer.

    Counts per chunk find the chunk, and a running count inside it the id: a running count over V
    is slow.
    """
    num_rows, vocab = mask.shape
    chunks = jnp.pad(mask, ((0, 0), (0, -vocab % _CHUNK))).reshape(num_rows, -1, _CHUNK)
    running = jnp.cumsum(jnp.sum(chunks, axis=-1, dtype=jnp.int32), axis=-1)
    num_full = jnp.sum(running < num_wanted, axis=-1, keepdims=True, dtype=jnp.int32)
    chunk = jnp.minimum(num_full, running.shape[-1] - 1)
    inside = jnp.take_along_axis(chunks, chunk[:, :, None], axis=1)[:, 0].astype(jnp.int32)
    before = jnp.take_along_axis(running, chunk, axis=1) - jnp.sum(inside, axis=-1, keepdims=True)
    is_early = before + jnp.cumsum(inside, axis=-1) < num_wanted
    last_id = num_full * _CHUNK + jnp.sum(is_early, axis=-1, keepdims=True, dtype=jnp.int32)
    return _token_ids(mask) <= last_id


def _exponential_noise(seed: Int[Array, "R"], output_position: Int[Array, "R"], vocab: int) -> Rows:
    """Exp(1) variates, finite and > 0, each a function of (seed, output_position, id)."""
    key = (_column(seed).astype(jnp.uint32), _column(output_position).astype(jnp.uint32))
    ids = lax.broadcasted_iota(jnp.uint32, (1, vocab), 1)
    bits = _threefry(key, (ids, jnp.zeros_like(ids)))
    # Winners have small noise, so the uniform is fine near 0: steps of 2^-31.
    uniform = (bits >> jnp.uint32(1)).astype(jnp.int32).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    u = jnp.minimum(uniform, 1.0 - 2.0**-24)
    # -log1p(-u); near 0 by its series, to 1e-7 relative. Much faster than XLA's log1p on CPU.
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return jnp.where(u < 2.0**-6, series, -jnp.log(1.0 - u))


def _threefry(
    key: tuple[UInt32[Array, "R 1"], UInt32[Array, "R 1"]],
    counter: tuple[UInt32[Array, "1 V"], UInt32[Array, "1 V"]],
) -> UInt32[Array, "R V"]:
    """The first word of Threefry-2x32-20, as jax.random computes it.

    Written out because jax.random keeps the rounds in a loop on CPU, which XLA cannot fuse: 8x
    slower. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    left, right = counter[0] + words[0], counter[1] + words[1]
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            left = left + right
            right = (right << jnp.uint32(distance)) | (right >> jnp.uint32(32 - distance))
            right = right ^ left
        left = left + words[(group + 1) % 3]
        right = right + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return left


def _suppress(values: Rows, suppressed_ids: Int32[Array, "R E"]) -> Rows:
    num_rows, num_ids = suppressed_ids.shape
    if num_ids == 0:
        return values

    def write(values: Rows) -> Rows:
        # A negative index would count from the end: -1 is moved past the end, and dropped there.
        ids = jnp.where(suppressed_ids < 0, jnp.int32(values.shape[-1]), suppressed_ids)
        rows = lax.broadcasted_iota(jnp.int32, (num_rows, num_ids), 0)
        return values.at[rows, ids].set(-jnp.inf, mode="drop")

    return lax.cond(jnp.any(suppressed_ids >= 0), write, lambda values: values, values)


def _first_argmax(values: Rows) -> Int32[Array, "R"]:
    # Two plain reductions: XLA's CPU argmax is one reduction over pairs, and 8x slower.
    highest = jnp.max(values, axis=-1, keepdims=True)
    none = jnp.int32(values.shape[-1])
    return jnp.min(jnp.where(values == highest, _token_ids(values), none), axis=-1)


def _is_finite(values: Rows) -> Bool[Array, "R"]:
    return jnp.isfinite(jnp.max(values, axis=-1))


def _token_ids(values: Rows) -> Int32[Array, "R V"]:
    return lax.broadcasted_iota(jnp.int32, values.shape, 1)


def _column(array: Array) -> Array:
    return array[:, None]
