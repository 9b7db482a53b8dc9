"""Paged attention in plain XLA operations: the fast path on CPU, correct on any platform.

Owns: two passes of the same online softmax, whose trip counts follow the real contexts.

    single pass   rows with q_len == 1. Their contexts are cut into items (row, group of blocks),
                  numbered through all rows; each iteration takes the next W items, whichever rows
                  they belong to, so one long row costs what its tokens cost. Large items take all
                  of a context but its last part, for which there are small ones.
    tile pass     rows with q_len > 1. Their queries are cut into items (row, tile of queries); each
                  item walks its row's context, from the first block its window sees to the last
                  one causality allows, with matrix products.

All item counts are traced: a batch without long rows runs zero iterations of the tile pass, so
prompt, chunk, decode and mixed steps share one executable. No whole context is ever gathered.

In and out: the contract in `paged_attention/__init__.py`. Must not know: how blocks were chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention import layout
from kernels_pallas.paged_attention.layout import KvDims, kv_dims

LAYOUT = layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes of what one iteration of a loop takes.

    Args:
        item_tokens: single pass, context tokens of a whole item; at least one block.
        rest_tokens: the same of the items that take what whole items leave of a context.
        max_items: single pass, items of an iteration.
        iteration_bytes: single pass, K and V gathered at once, over all items of an iteration.
        tile_queries: tile pass, queries of one item.
        tile_tokens: tile pass, context tokens of an iteration.
    """

    item_tokens: int = 256
    rest_tokens: int = 64
    max_items: int = 32
    iteration_bytes: int = 4 << 20
    tile_queries: int = 64
    tile_tokens: int = 128


def default_tiles(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_blocks: jax.Array | jax.ShapeDtypeStruct,
    block_table: jax.Array | jax.ShapeDtypeStruct,
    *,
    device_kind: str | None = None,
) -> Tiles:
    """Those measured on two CPU cores (experiments/LOG.md), whatever the call and the device."""
    del q, kv_blocks, block_table, device_kind
    return Tiles()


def candidate_tiles(base: Tiles, block_size: int) -> Iterator[Tiles]:
    """Half and twice of each size of `base`, one at a time."""
    del block_size
    for field in fields(base):
        for factor in (0.5, 2.0):
            size = max(1, int(getattr(base, field.name) * factor))
            yield replace(base, **{field.name: size})


MASKED = -1e30  # finite: exp(MASKED - MASKED) is 1, never NaN

Softmax = tuple[jax.Array, jax.Array, jax.Array]  # running maximum m, denominator, numerator acc
LoopState = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # a counter, then a Softmax


class Batch(NamedTuple):
    """The ragged arguments that both passes read."""

    kv_blocks: jax.Array
    kv_scales: jax.Array | None
    block_table: jax.Array
    context_lens: jax.Array
    cu_q_lens: jax.Array
    sliding_window: int | None

    @property
    def dims(self) -> KvDims:
        return kv_dims(self.kv_blocks.shape)


class Items(NamedTuple):
    """A list of work items numbered through all rows: row r owns starts[r] : ends[r]."""

    starts: jax.Array
    ends: jax.Array

    @property
    def total(self) -> jax.Array:
        return self.ends[-1]

    def row_of(self, item: jax.Array) -> jax.Array:
        """Row of each item; past the end, the last row."""
        row = jnp.searchsorted(self.ends, item, side="right", method="compare_all")
        return jnp.minimum(row, self.ends.shape[0] - 1).astype(jnp.int32)


def paged_attention(
    q: jax.Array,
    kv_blocks: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_rows: jax.Array | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: jax.Array | None = None,
    device_kind: str | None = None,
    tiles: Tiles | None = None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention.paged_attention`."""
    tiles = tiles or default_tiles(q, kv_blocks, block_table, device_kind=device_kind)
    batch = Batch(kv_blocks, kv_scales, block_table, context_lens, cu_q_lens, sliding_window)
    is_real = jnp.arange(context_lens.shape[0]) < num_rows
    q_lens = jnp.where(is_real, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    scaled = q.astype(jnp.float32) * scale
    out = _single_pass(scaled, batch, q_lens == 1, tiles)
    out = _tile_pass(scaled, batch, jnp.where(q_lens > 1, q_lens, 0), out, tiles)
    return out.astype(q.dtype)


def _items(counts: jax.Array) -> Items:
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    return Items(ends - counts, ends)


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + (b - 1)) // b


class Read(NamedTuple):
    """K and V of some blocks of W items, float32; factors are None where nothing is quantised."""

    k: jax.Array  # [W, K, C, H]
    v: jax.Array  # likewise; zero where not visible
    k_factors: jax.Array | None  # [W, K, C]
    v_factors: jax.Array | None  # likewise; zero where not visible


def _gather(batch: Batch, block_ids: jax.Array, visible: jax.Array) -> Read:
    """Read blocks [W, B] of which the slots `visible` [W, C = B * S] may be seen.

    Heads come out outside the tokens, so that every dot is one [queries, H] x [H, C] per kv head.
    What is gathered are rows of a matrix, one per block and head, and it happens in a branch of its
    own: XLA would fuse the gather with the reshape after it and compute an index per element, at
    half the speed. The other branch masks V as well as the scores, since 0 * NaN is NaN.
    """
    num_items, num_blocks = block_ids.shape
    _, block_size, num_kv_heads, head_dim = batch.dims
    rows = batch.kv_blocks.reshape(-1, block_size * head_dim)
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)
    k_rows = (block_ids[:, None, :] * (2 * num_kv_heads) + head[None, :, None]).reshape(-1)
    v_rows = k_rows + num_kv_heads
    by_block = jnp.broadcast_to(
        visible.reshape(num_items, 1, num_blocks, block_size),
        (num_items, num_kv_heads, num_blocks, block_size),
    ).reshape(-1, block_size)

    def plain() -> tuple[jax.Array, jax.Array]:
        return _take(rows, k_rows), _take(rows, v_rows)

    def masked() -> tuple[jax.Array, jax.Array]:
        k, v = plain()
        seen = jnp.where(
            by_block[:, :, None], v.reshape(-1, block_size, head_dim), jnp.zeros((), v.dtype)
        )
        return k, seen.reshape(v.shape)

    k, v = lax.cond(visible.all(), plain, masked)
    shape = (num_items, num_kv_heads, num_blocks * block_size)
    k_factors = v_factors = None
    if batch.kv_scales is not None:
        factors = batch.kv_scales.reshape(-1, block_size)
        k_factors = _take(factors, k_rows).reshape(shape)
        v_factors = jnp.where(by_block, _take(factors, v_rows), 0.0).reshape(shape)
    k, v = (x.reshape(*shape, head_dim).astype(jnp.float32) for x in (k, v))
    return Read(k, v, k_factors, v_factors)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of a matrix; the index is known to be in bounds (ids were checked on the host)."""
    return rows.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _single_pass(q: jax.Array, batch: Batch, is_single: jax.Array, tiles: Tiles) -> jax.Array:
    """Rows with one query: scaled q [T, N, H] -> [T, N, H] float32, zeros for other tokens."""
    max_rows = batch.block_table.shape[0]
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = batch.dims
    grouped = (max_rows, num_kv_heads, num_heads // num_kv_heads)
    row_q = q[jnp.minimum(batch.cu_q_lens[:-1], num_tokens - 1)].reshape(*grouped, head_dim)

    block = jnp.zeros_like(batch.context_lens)
    if batch.sliding_window is not None:
        block = jnp.maximum(batch.context_lens - batch.sliding_window, 0) // block_size
    tokens = jnp.where(is_single, batch.context_lens - block * block_size, 0)
    state = (
        jnp.full(grouped, MASKED, jnp.float32),
        jnp.zeros(grouped, jnp.float32),
        jnp.zeros((*grouped, head_dim), jnp.float32),
    )
    whole = max(1, tiles.item_tokens // block_size)
    # A window cuts items at both ends of a row, so that none counts as whole.
    num_whole = jnp.zeros_like(tokens)
    if batch.sliding_window is None:
        num_whole = tokens // (whole * block_size)
        state = _walk(row_q, batch, block, num_whole, whole, state, tiles)
    rest = max(1, tiles.rest_tokens // block_size)
    num_rest = _ceil_div(tokens - num_whole * (whole * block_size), rest * block_size)
    state = _walk(row_q, batch, block + num_whole * whole, num_rest, rest, state, tiles)
    _, denom, acc = state
    row_out = _normalise(acc, denom).reshape(max_rows, num_heads, head_dim)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = Items(batch.cu_q_lens[:-1], batch.cu_q_lens[1:]).row_of(token)
    is_out = is_single[row] & (token < batch.cu_q_lens[-1])
    return jnp.where(is_out[:, None, None], row_out[row], 0.0)


def _walk(
    row_q: jax.Array,
    batch: Batch,
    first_block: jax.Array,
    num_items: jax.Array,
    blocks_per_item: int,
    state: Softmax,
    tiles: Tiles,
) -> Softmax:
    """Take each row's items, `num_items` [R] of `blocks_per_item` from `first_block` [R] on, into
    its softmax; row_q [R, K, G, H].
    """
    max_rows, max_blocks = batch.block_table.shape
    _, block_size, num_kv_heads, head_dim = batch.dims
    item_tokens = blocks_per_item * block_size
    item_bytes = 2 * item_tokens * num_kv_heads * head_dim * 4
    # W, a power of two as batches tend to be, so that their items leave no iteration half empty.
    most = max(1, min(tiles.max_items, tiles.iteration_bytes // item_bytes))
    width = 1 << (most.bit_length() - 1)
    items = _items(num_items)

    def attend(item: jax.Array) -> tuple[jax.Array, ...]:
        """Items [W] -> row, is_item [W] and softmax parts m, denom [W, K, G], o [W, K, G, H]."""
        is_item = item < items.total
        row = items.row_of(item)
        block = first_block[row] + (item - items.starts[row]) * blocks_per_item
        column = block[:, None] + jnp.arange(blocks_per_item, dtype=jnp.int32)[None, :]
        ids = batch.block_table[row[:, None], jnp.minimum(column, max_blocks - 1)]
        ids = jnp.where(is_item[:, None], ids, 0)
        position = block[:, None] * block_size + jnp.arange(item_tokens)[None, :]
        context = batch.context_lens[row][:, None]
        visible = (position < context) & is_item[:, None]
        if batch.sliding_window is not None:
            visible &= context - 1 - position < batch.sliding_window

        read = _gather(batch, ids, visible)
        scores = _dot("wkgh,wkch->wkgc", row_q[row], read.k)
        if read.k_factors is not None:
            scores = scores * read.k_factors[:, :, None, :]
        scores = jnp.where(visible[:, None, None, :], scores, MASKED)
        m = scores.max(-1)
        p = jnp.exp(scores - m[..., None])
        denom = p.sum(-1)
        if read.v_factors is not None:
            p = p * read.v_factors[:, :, None, :]
        return row, is_item, m, denom, _dot("wkgc,wkch->wkgh", p, read.v)

    def step(state: LoopState) -> LoopState:
        i, m, denom, acc = state
        row, is_item, item_m, item_denom, item_o = attend(
            i * width + jnp.arange(width, dtype=jnp.int32)
        )
        belongs = (row[None, :] == jnp.arange(max_rows)[:, None]) & is_item[None, :]  # [R, W]
        new_m = jnp.maximum(m, jnp.where(belongs[:, :, None, None], item_m[None], MASKED).max(1))
        weight = jnp.exp(item_m - new_m[row])
        decay = jnp.exp(m - new_m)
        denom = denom * decay + _sum_by_row(belongs, item_denom * weight)
        acc = acc * decay[..., None] + _sum_by_row(belongs, item_o * weight[..., None])
        return i + 1, new_m, denom, acc

    trips = _ceil_div(items.total, width)
    looped = lax.while_loop(lambda state: state[0] < trips, step, (jnp.int32(0), *state))
    return looped[1:]


def _sum_by_row(belongs: jax.Array, x: jax.Array) -> jax.Array:
    """Sum items into their rows: belongs [R, W], x [W, ...] -> [R, ...].

    A matrix product is the fastest sum by row here, but 0 * NaN is NaN: one request whose values
    overflowed would spoil every row. So non-finite items enter as 0, and only their own row is
    made NaN afterwards.
    """
    flat = x.reshape(x.shape[0], -1)
    is_finite = jnp.isfinite(flat).all(1)
    flat = jnp.where(is_finite[:, None], flat, 0.0)
    total = _dot("rw,wx->rx", belongs.astype(jnp.float32), flat)
    spoiled = (belongs & ~is_finite[None, :]).any(1)
    total = jnp.where(spoiled[:, None], jnp.nan, total)
    return total.reshape(belongs.shape[0], *x.shape[1:])


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of float32 numbers with all their bits: a TPU would round them to bfloat16 first,
    and a GPU to TF32.
    """
    return jnp.einsum(subscripts, a, b, precision="highest")


def _normalise(acc: jax.Array, denom: jax.Array) -> jax.Array:
    """acc / denom, zeros where there was no context; a NaN stays one."""
    is_empty = denom == 0.0
    return jnp.where(is_empty[..., None], 0.0, acc / jnp.where(is_empty, 1.0, denom)[..., None])


def _tile_pass(
    q: jax.Array, batch: Batch, q_lens: jax.Array, out: jax.Array, tiles: Tiles
) -> jax.Array:
    """Rows with several queries (q_lens 0 elsewhere): writes their tokens into `out` [T, N, H]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = batch.dims.num_kv_heads
    tile = min(tiles.tile_queries, num_tokens)
    items = _items(_ceil_div(q_lens, tile))

    def step(item: jax.Array, out: jax.Array) -> jax.Array:
        row = items.row_of(item)
        first, end = batch.cu_q_lens[row], batch.cu_q_lens[row + 1]
        first = first + (item - items.starts[row]) * tile
        # The last tile of the array is moved back to fit: its first queries are then not its own.
        start = jnp.minimum(first, num_tokens - tile)
        token = start + jnp.arange(tile, dtype=jnp.int32)
        is_own = (token >= first) & (token < end)
        position = batch.context_lens[row] - end + token
        tile_q = lax.dynamic_slice_in_dim(q, start, tile)  # [tile, N, H] -> [K, G * tile, H]
        tile_q = tile_q.transpose(1, 0, 2).reshape(num_kv_heads, -1, head_dim)
        tile_out = _attend_tile(tile_q, batch, row, position, is_own, tiles)
        tile_out = tile_out.reshape(num_heads, tile, head_dim).transpose(1, 0, 2)
        kept = lax.dynamic_slice_in_dim(out, start, tile)
        merged = jnp.where(is_own[:, None, None], tile_out, kept)
        return lax.dynamic_update_slice_in_dim(out, merged, start, 0)

    return lax.fori_loop(0, items.total, step, out)


def _attend_tile(
    q: jax.Array,
    batch: Batch,
    row: jax.Array,
    position: jax.Array,
    is_own: jax.Array,
    tiles: Tiles,
) -> jax.Array:
    """One tile of one row: q [K, G * tile, H], position and is_own [tile] -> [K, G * tile, H]."""
    max_blocks = batch.block_table.shape[1]
    block_size = batch.dims.block_size
    num_blocks = max(1, tiles.tile_tokens // block_size)
    num_context = num_blocks * block_size
    num_kv_heads, num_queries, head_dim = q.shape
    tile = position.shape[0]
    group = num_queries // tile

    # Positions seen by any query of the tile: from lowest to last.
    last = jnp.max(jnp.where(is_own, position, 0))
    lowest = jnp.zeros_like(last)
    if batch.sliding_window is not None:
        first_query = jnp.min(jnp.where(is_own, position, last))
        lowest = jnp.maximum(first_query - batch.sliding_window + 1, 0)

    def step(state: LoopState) -> LoopState:
        block, m, denom, acc = state
        column = jnp.minimum(block + jnp.arange(num_blocks, dtype=jnp.int32), max_blocks - 1)
        ids = batch.block_table[row, column][None, :]
        context = block * block_size + jnp.arange(num_context, dtype=jnp.int32)
        visible = (context[None, :] <= position[:, None]) & is_own[:, None]
        if batch.sliding_window is not None:
            visible &= position[:, None] - context[None, :] < batch.sliding_window
        is_seen = (context >= lowest) & (context <= last)
        read = _gather(batch, ids, is_seen[None, :])
        scores = _dot("kqh,kch->kqc", q, read.k[0])
        if read.k_factors is not None:
            scores = scores * read.k_factors[0, :, None, :]
        scores = scores.reshape(num_kv_heads, group, tile, -1)
        scores = jnp.where(visible[None, None], scores, MASKED)
        scores = scores.reshape(num_kv_heads, num_queries, -1)
        new_m = jnp.maximum(m, scores.max(-1))
        p = jnp.exp(scores - new_m[..., None])
        decay = jnp.exp(m - new_m)
        denom = denom * decay + p.sum(-1)
        if read.v_factors is not None:
            p = p * read.v_factors[0, :, None, :]
        acc = acc * decay[..., None] + _dot("kqc,kch->kqh", p, read.v[0])
        return block + num_blocks, new_m, denom, acc

    state = (
        lowest // block_size,
        jnp.full((num_kv_heads, num_queries), MASKED, jnp.float32),
        jnp.zeros((num_kv_heads, num_queries), jnp.float32),
        jnp.zeros((num_kv_heads, num_queries, head_dim), jnp.float32),
    )
    _, _, denom, acc = lax.while_loop(lambda state: state[0] * block_size <= last, step, state)
    return _normalise(acc, denom)
