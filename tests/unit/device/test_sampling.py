"""Sampling against a float64 numpy reference of the kept set, and the laws of the draw."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxserve.arrays import SamplingArrays
from paxserve.device import sampling

# Below this distance from the cut, float32 and float64 masses may fall on different sides.
MASS_TOLERANCE = 1e-5
# Below this gap of the two best perturbed logits, the two may choose differently.
GAP_TOLERANCE = 1e-3

greedy = jax.jit(sampling.greedy)
sample = jax.jit(sampling.sample)
filtered_weights = jax.jit(sampling.filtered_weights)
perturbed_logits = jax.jit(sampling.perturbed_logits)
top_logprobs = jax.jit(sampling.top_logprobs, static_argnums=2)
exponential_noise = jax.jit(sampling._exponential_noise, static_argnums=2)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def make_arrays(
    num_rows,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    output_position=0,
    suppressed_ids=(),
):
    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (num_rows,)))

    suppressed = np.asarray(suppressed_ids, np.int32)
    suppressed = np.broadcast_to(suppressed, (num_rows, suppressed.shape[-1]))
    return SamplingArrays(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seed=column(seed, np.uint32),
        output_position=column(output_position, np.int32),
        suppressed_ids=jnp.asarray(suppressed),
    )


def reference_row(logits, temperature, top_k, top_p, min_p):
    """The probabilities of one row after the filters, and whether its cut is clear in float32."""
    values = np.asarray(logits, np.float64)
    order = np.lexsort((np.arange(len(values)), -values))
    probs = np.exp((values - values.max()) / float(temperature))[order]
    if top_k:
        probs[top_k:] = 0
    probs /= probs.sum()
    is_clear = True
    if top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(probs)[:-1]])
        is_clear = np.abs(before - top_p).min() > MASS_TOLERANCE
        probs[(before >= top_p) & (np.arange(len(values)) > 0)] = 0
    share = probs / probs[0]
    is_clear &= np.abs(share - min_p).min() > 1e-6 or min_p == 0
    probs[share < min_p] = 0
    unsorted = np.zeros_like(probs)
    unsorted[order] = probs / probs.sum()
    return unsorted, is_clear


def logits_of_kind(kind, shape):
    rng = np.random.default_rng(7)
    normal = rng.normal(size=shape)
    logits = {
        "flat": normal,
        "peaked": 6 * normal,
        "equal": np.full(shape, 3.25),
        "tied": np.round(2 * normal),
        "holes": np.where(rng.random(shape) < 0.5, -np.inf, 2 * normal),
    }[kind]
    logits[np.all(logits == -np.inf, axis=1), 0] = 1.0
    return logits.astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 7, 128, 1000])
@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "tied", "holes"])
def test_kept_set_and_token_match_reference_for_all_filters(kind, vocab):
    top_ks = (0, 1, 3, 50, vocab, vocab + 9)
    grid = list(
        itertools.product((0.5, 1.3), top_ks, (1.0, 0.9537, 0.4793, 0.0471), (0.0, 0.1, 0.71))
    )
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*grid, strict=True))
    arrays = make_arrays(
        len(grid),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=np.arange(len(grid)),
    )
    logits = logits_of_kind(kind, (len(grid), vocab))
    weights = np.asarray(filtered_weights(logits, arrays))
    perturbed = np.asarray(perturbed_logits(logits, arrays))
    tokens = np.asarray(sample(logits, arrays))
    noise = exponential_noise(arrays.seed, arrays.output_position, vocab)
    gumbel = -np.log(np.asarray(noise, np.float64))

    num_clear = 0
    for row in range(len(grid)):
        expected, is_clear = reference_row(
            logits[row], *(np.asarray(column)[row] for column in arrays[:4])
        )
        if not is_clear:
            continue
        num_clear += 1
        np.testing.assert_array_equal(weights[row] > 0, expected > 0, err_msg=str(grid[row]))
        np.testing.assert_allclose(weights[row] / weights[row].sum(), expected, atol=2e-6)
        assert tokens[row] == np.argmax(perturbed[row])
        kept = np.flatnonzero(expected)
        scores = np.log(expected[kept]) + gumbel[row][kept]
        if len(kept) == 1 or np.diff(np.sort(scores)[-2:])[0] > GAP_TOLERANCE:
            assert tokens[row] == kept[np.argmax(scores)], grid[row]
    assert num_clear > 0.8 * len(grid)


@given(
    logits=st.lists(
        st.one_of(st.integers(-3, 3).map(float), st.floats(-40, 40, width=16), st.just(-np.inf)),
        min_size=13,
        max_size=13,
    ),
    temperature=st.floats(0.0625, 4, width=32),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.015625, 1, width=32),
    min_p=st.floats(0, 1, width=32),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_kept_set_matches_reference(logits, temperature, top_k, top_p, min_p):
    logits = np.array(logits, np.float32)[None]
    if np.all(logits == -np.inf):
        logits[0, 4] = 0
    expected, is_clear = reference_row(logits[0], temperature, top_k, top_p, min_p)
    arrays = make_arrays(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = np.asarray(filtered_weights(logits, arrays))[0]
    assert expected[sample(logits, arrays)[0]] > 0 or not is_clear
    if is_clear:
        is_visible = (expected > 1e-30) | (expected == 0)  # float32 weights underflow at 1e-38
        np.testing.assert_array_equal((weights > 0)[is_visible], (expected > 0)[is_visible])


def test_equal_logits_keep_exactly_k_lowest_ids():
    vocab = 300
    arrays = make_arrays(vocab, top_k=np.arange(1, vocab + 1))
    kept = np.asarray(filtered_weights(jnp.full((vocab, vocab), 1.5), arrays)) > 0
    np.testing.assert_array_equal(kept, np.tri(vocab, dtype=bool))


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 64), (0.5, 128), (0.501, 129), (1e-9, 1)])
def test_equal_logits_keep_smallest_set_reaching_top_p(top_p, num_kept):
    kept = np.asarray(filtered_weights(jnp.zeros((1, 256)), make_arrays(1, top_p=top_p)))[0] > 0
    np.testing.assert_array_equal(kept, np.arange(256) < num_kept)


def test_filters_off_keep_every_finite_token():
    logits = logits_of_kind("holes", (4, 1000))
    kept = np.asarray(filtered_weights(logits, make_arrays(4))) > 0
    np.testing.assert_array_equal(kept, np.isfinite(logits))


def test_top_k_comes_before_top_p():
    # Of 8 equal tokens top_k keeps 4; half of those is 2. The other order would keep 4.
    arrays = make_arrays(1, top_k=4, top_p=0.5)
    kept = np.asarray(filtered_weights(jnp.zeros((1, 8)), arrays))[0] > 0
    np.testing.assert_array_equal(kept, np.arange(8) < 2)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_large_vocabulary_cuts_where_the_mass_says(dtype):
    vocab = 49_152
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(3, vocab)), dtype)
    arrays = make_arrays(3, temperature=0.8, top_k=[0, 0, 20_000], top_p=[0.95, 0.3, 0.9])
    weights = np.asarray(filtered_weights(logits, arrays))
    for row in range(3):
        expected, _ = reference_row(
            np.asarray(logits[row], np.float64), 0.8, int(arrays.top_k[row]), arrays.top_p[row], 0
        )
        differing = (weights[row] > 0) != (expected > 0)
        assert expected[differing].sum() < 1e-4
        assert differing.sum() <= 4


def chi_square(counts, probs):
    expected = probs * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    degrees = kept.sum() - 1
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    return (statistic - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("varies", ["seed", "output_position"])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.8, "min_p": 0.05}]
)
def test_frequencies_follow_the_filtered_softmax(filters, varies):
    num_draws, vocab = 40_000, 50
    row = logits_of_kind("flat", (1, vocab))
    fixed = {"seed": 11, "output_position": 5, varies: np.arange(num_draws)}
    arrays = make_arrays(num_draws, temperature=0.8, **filters, **fixed)
    tokens = np.asarray(sample(jnp.broadcast_to(row, (num_draws, vocab)), arrays))
    settings_row = [np.asarray(column)[0] for column in arrays[:4]]
    probs, is_clear = reference_row(row[0], *settings_row)
    assert is_clear
    assert abs(chi_square(np.bincount(tokens, minlength=vocab), probs)) < 4


def test_consecutive_positions_and_seeds_are_independent():
    vocab, num_seeds, num_positions = 6, 200, 200
    seeds, positions = np.divmod(np.arange(num_seeds * num_positions), num_positions)
    arrays = make_arrays(len(seeds), seed=seeds, output_position=positions)
    tokens = np.asarray(sample(jnp.zeros((len(seeds), vocab)), arrays))
    grid = tokens.reshape(num_seeds, num_positions)
    uniform = np.full(vocab**2, 1 / vocab**2)
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]), (grid, grid.T)):
        off_diagonal = first.shape != second.T.shape or ~np.eye(num_seeds, dtype=bool)
        pairs = (first * vocab + second)[off_diagonal]
        assert abs(chi_square(np.bincount(pairs.ravel(), minlength=vocab**2), uniform)) < 5


def test_rare_tokens_are_as_rare_as_they_should_be():
    # One token of probability 1e-3 among 4,000 others: the noise's tail must be fine enough.
    vocab, num_draws = 4001, 20_000
    row = np.zeros((1, vocab), np.float32)
    row[0, 17] = np.log(4000 * 1e-3 / (1 - 1e-3))
    arrays = make_arrays(num_draws, output_position=np.arange(num_draws))
    tokens = np.asarray(sample(jnp.broadcast_to(row, (num_draws, vocab)), arrays))
    hits = (tokens == 17).sum()
    assert abs(hits - 20) < 5 * np.sqrt(20)
    assert abs(tokens.mean() - 2000) < 5 * vocab / np.sqrt(12 * num_draws)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 24])
def test_token_does_not_depend_on_row_neighbours_or_bucket(num_rows):
    vocab = 300
    own = logits_of_kind("flat", (1, vocab))
    request = {"temperature": 0.9, "top_k": 150, "top_p": 0.9, "seed": 42, "output_position": 9}
    alone = int(sample(own, make_arrays(1, **request))[0])
    rng = np.random.default_rng(num_rows)
    for row in {0, num_rows // 2, num_rows - 1}:
        logits = rng.normal(size=(num_rows, vocab)).astype(np.float32) * 9
        logits[row] = own[0]
        mates = {
            "temperature": rng.choice([0.0, 0.7, 1.5], num_rows),
            "top_k": rng.choice([0, 1, 30], num_rows),
            "top_p": rng.choice([1.0, 0.2], num_rows),
            "seed": rng.integers(0, 2**32, num_rows),
            "output_position": rng.integers(0, 99, num_rows),
        }
        for name, value in request.items():
            mates[name][row] = value
        assert sample(logits, make_arrays(num_rows, **mates))[row] == alone


def test_equal_seeds_side_by_side_agree_and_others_differ():
    seed, output_position = [5, 5, 6, 5, 2**32 - 1, 3, 0, 0], [3, 3, 3, 4, 3, 5, 0, 1]
    logits = jnp.zeros((8, 300))
    arrays = make_arrays(8, seed=seed, output_position=output_position)
    tokens = np.asarray(sample(logits, arrays))
    assert tokens[0] == tokens[1]
    assert len(set(tokens.tolist())) == 7


def test_temperature_zero_is_greedy_inside_a_sampled_batch():
    logits = logits_of_kind("tied", (8, 300))
    temperature = np.where(np.arange(8) % 2, 1.0, 0.0)
    arrays = make_arrays(8, temperature=temperature, top_k=40, seed=np.arange(8))
    expected = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(sample(logits, arrays)[::2], expected[::2])
    assert np.any(np.asarray(sample(logits, arrays))[1::2] != expected[1::2])
    np.testing.assert_array_equal(greedy(logits), expected)


def test_tiny_temperature_is_greedy_without_overflow():
    logits = logits_of_kind("flat", (8, 300)) * 1e4
    arrays = make_arrays(8, temperature=1e-30, top_p=0.9, seed=np.arange(8))
    np.testing.assert_array_equal(sample(logits, arrays), np.argmax(logits, axis=-1))


def test_suppressed_ids_are_never_chosen():
    logits = jnp.broadcast_to(jnp.asarray([9.0, 8.0, 1.0, 1.0, 7.0]), (64, 5))
    arrays = make_arrays(
        64,
        temperature=np.arange(64) % 2,
        seed=np.arange(64),
        suppressed_ids=np.tile([[0, 1, -1], [-1, 4, 0]], (32, 1)),
    )
    tokens = np.asarray(sample(logits, arrays))
    assert set(tokens[::2].tolist()) == {4}
    assert set(tokens[1::2].tolist()) <= {1, 2, 3}
    # -1 stands for none: the last id stays available.
    last = make_arrays(1, temperature=0.0, suppressed_ids=[-1, -1])
    assert sample(jnp.asarray([[0.0, 1.0, 2.0]]), last)[0] == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "bad", [{0: np.nan}, {299: np.nan}, {5: np.inf}, {3: np.nan, 4: np.inf}, "all nan", "all -inf"]
)
def test_non_finite_row_fails_alone(bad, temperature):
    logits = logits_of_kind("flat", (8, 300))
    filters = {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": temperature}
    arrays = make_arrays(8, seed=np.arange(8), **filters)
    tokens, argmax = np.array(sample(logits, arrays)), np.array(greedy(logits))
    if isinstance(bad, dict):
        for index, value in bad.items():
            logits[3, index] = value
    else:
        logits[3] = float(bad.removeprefix("all "))
    tokens[3] = argmax[3] = sampling.FAILED
    np.testing.assert_array_equal(sample(logits, arrays), tokens)
    np.testing.assert_array_equal(greedy(logits), argmax)


def test_row_with_everything_suppressed_fails():
    arrays = make_arrays(2, temperature=[0.0, 1.0], suppressed_ids=[0, 1])
    np.testing.assert_array_equal(sample(jnp.zeros((2, 2)), arrays), [sampling.FAILED] * 2)


@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "holes"])
def test_logprobs_and_ranks(kind):
    num_rows, vocab, k = 9, 333, 5
    logits = logits_of_kind(kind, (num_rows, vocab))
    tokens = np.random.default_rng(0).integers(0, vocab, num_rows)
    values = logits.astype(np.float64)
    highest = values.max(axis=-1, keepdims=True)
    expected = values - highest - np.log(np.exp(values - highest).sum(axis=-1, keepdims=True))
    order = np.stack([np.lexsort((np.arange(vocab), -row)) for row in values])

    chosen, rank, top_ids, top = top_logprobs(logits, jnp.asarray(tokens), k)
    np.testing.assert_allclose(chosen, expected[np.arange(num_rows), tokens], atol=1e-5)
    np.testing.assert_array_equal(order[np.arange(num_rows), np.asarray(rank) - 1], tokens)
    np.testing.assert_array_equal(top_ids, order[:, :k])
    np.testing.assert_allclose(top, np.take_along_axis(expected, order[:, :k], 1), atol=1e-5)
    assert top_logprobs(logits, jnp.asarray(tokens), 0)[2].shape == (num_rows, 0)


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [
        ((0, 0), (0, 0), 0x6B200159),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), 0x1CB996FC),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), 0xC4923A9C),
    ],
)
def test_threefry_known_answers(counter, key, word):
    # Source: Random123, kat_vectors, threefry2x32 with 20 rounds.
    def pair(words):
        return tuple(jnp.full((1, 1), word, jnp.uint32) for word in words)

    assert int(sampling._threefry(pair(key), pair(counter))[0, 0]) == word


def test_noise_is_exponential_down_to_its_tail():
    shape = (64, 50_000)
    seeds = jnp.arange(shape[0], dtype=jnp.uint32)
    noise = exponential_noise(seeds, jnp.zeros(64, jnp.int32), shape[1])
    noise = np.asarray(noise, np.float64)
    assert np.isfinite(noise).all()
    assert noise.min() > 0
    for threshold in (1e-5, 1e-4, 0.01, 2.0**-6, 0.02, 0.5, 1.0, 3.0, 8.0):
        probability = -np.expm1(-threshold)
        error = (noise < threshold).mean() - probability
        assert abs(error) < 5 * np.sqrt(probability * (1 - probability) / noise.size)


def test_noise_is_the_logarithm_of_its_bits():
    vocab = 50_000
    ids = jnp.arange(vocab, dtype=jnp.uint32)[None]
    key = (jnp.full((1, 1), 4, jnp.uint32), jnp.full((1, 1), 7, jnp.uint32))
    bits = np.asarray(sampling._threefry(key, (ids, jnp.zeros_like(ids))), np.float64)
    noise = np.asarray(exponential_noise(jnp.asarray([4]), jnp.asarray([7]), vocab))
    expected = -np.log1p(-(bits + 1) / 2**32)
    np.testing.assert_allclose(noise, expected, rtol=1e-3)
    # The winners are the small ones.
    small = expected < 0.1
    np.testing.assert_allclose(noise[small], expected[small], rtol=5e-6, atol=1e-9)


def test_one_executable_serves_every_setting():
    # A fresh function: the jit cache above already holds other shapes.
    count_traces = jax.jit(lambda logits, arrays: sampling.sample(logits, arrays))
    logits = logits_of_kind("flat", (4, 64))
    for options in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.2}):
        count_traces(logits, make_arrays(4, **options))
    assert count_traces._cache_size() == 1
