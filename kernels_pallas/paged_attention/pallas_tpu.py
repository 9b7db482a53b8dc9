"""Ragged paged attention on TPU: a Mosaic kernel that copies blocks through the block table.

Owns: what the kernel takes and what it does not, its tile sizes, and the little that XLA does
around it: the decodes' contexts are shared out to the cores by tiles, and a decode that the edge of
a share cuts (flash-decoding; at most one a step) is put together from two parts. In and out: the
contract in `paged_attention/__init__.py`. The kernel itself is `tpu_kernel.py`, the layout of the
cache `tpu_layout.py`. Must not know: which device is present.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import tpu_layout
from kernels_pallas.paged_attention.tpu_kernel import (
    TABLE_IDS,
    Refs,
    attention_kernel,
    pack,
    unpack,
)
from kernels_pallas.paged_attention.tpu_layout import LANES, SCALE_RUN, kv_dims
from kernels_pallas.paged_attention.tpu_walk import SHORT, Statics

LAYOUT = tpu_layout

MIB = 2**20
BLOCK_SIZES = (16, 32, 64, 128)
# VMEM of one core that a kernel may use, by the device's name in JAX; the rest is the compiler's.
VMEM_BYTES = {
    "TPU v4": 14 * MIB,
    "TPU v5 lite": 100 * MIB,
    "TPU v5": 48 * MIB,
    "TPU v5p": 48 * MIB,
    "TPU v6 lite": 100 * MIB,
}
LEAST_VMEM_BYTES = min(VMEM_BYTES.values())
# Cores of one device, which is a chip: its attribute num_cores (of v4, with libtpu's chip
# configuration "megacore", in which JAX runs it).
NUM_CORES = {"TPU v4": 2, "TPU v5": 2, "TPU v5p": 2, "TPU v5 lite": 1, "TPU v6 lite": 1}
MOST_CORES = max(NUM_CORES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes of the kernel's tiles.

    Args:
        query_tokens: queries of a tile of rows with more than 16; a power of two >= 16.
        context_tokens: tokens of K and V taken at once: a multiple of 128 and a power of two times
            the block size, up to 128 blocks.
        num_buffers: of that size; all but one are being filled while one is used; >= 2.
        num_cores: 1 or 2, how many the step is split over. 2 gives the right answer on one core as
            well, and costs it one more start of the pipeline.
    """

    query_tokens: int
    context_tokens: int
    num_buffers: int
    num_cores: int

    def check(self, block_size: int) -> None:
        """The rules of `Args`, for blocks of this size.

        Raises:
            ValueError: one is broken.
        """
        blocks = self.context_tokens // block_size
        good = (
            self.query_tokens >= SHORT
            and self.query_tokens & (self.query_tokens - 1) == 0
            and self.context_tokens % LANES == 0
            and blocks * block_size == self.context_tokens
            and blocks & (blocks - 1) == 0
            and blocks <= TABLE_IDS
            and self.num_buffers >= 2
            and self.num_cores in (1, 2)
        )
        if not good:
            raise ValueError(f"tiles break a rule of Tiles: {self}, {block_size=}")


def default_tiles(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_blocks: jax.Array | jax.ShapeDtypeStruct,
    block_table: jax.Array | jax.ShapeDtypeStruct,
    *,
    device_kind: str | None = None,
) -> Tiles:
    """Tiles from shapes and dtypes of a call's arguments.

    A context tile is 2 MiB of K and V, or 1 MiB where VMEM is small: some microseconds of copying,
    beside which the fixed cost of a step is little, and two of them in flight hide the latency of
    HBM. Queries fill 1024 rows of a kv head's matrix product, at which K and V are read seldom
    enough to leave prompts bound by computation; halved until all fits.
    """
    budget = VMEM_BYTES.get(device_kind or "", LEAST_VMEM_BYTES)
    _, block_size, num_kv_heads, _ = kv_dims(kv_blocks.shape)
    token_bytes = num_kv_heads * kv_blocks.shape[-1] * kv_blocks.dtype.itemsize
    wanted = (2 * MIB if budget > 32 * MIB else MIB) // token_bytes
    max_context = block_table.shape[1] * block_size
    context = power_of_two(min(wanted, 2048, max_context, TABLE_IDS * block_size))
    rows = 1024 // (q.shape[1] // num_kv_heads)
    tiles = Tiles(
        query_tokens=max(SHORT, power_of_two(min(rows, q.shape[0]))),
        context_tokens=max(context, LANES, block_size),
        num_buffers=3,
        num_cores=NUM_CORES.get(device_kind or "", MOST_CORES),
    )
    while vmem_bytes(q, kv_blocks, tiles) > budget:
        if tiles.query_tokens > SHORT:
            tiles = replace(tiles, query_tokens=tiles.query_tokens // 2)
        elif tiles.context_tokens > max(LANES, block_size):
            tiles = replace(tiles, context_tokens=tiles.context_tokens // 2)
        else:
            break  # the compiler has the last word
    return tiles


def candidate_tiles(base: Tiles, block_size: int) -> Iterator[Tiles]:
    """`base` and its neighbours, each once, for a search; those too large fail to compile."""
    sizes = {
        replace(
            base,
            query_tokens=max(SHORT, base.query_tokens * query_halves // 2),
            context_tokens=base.context_tokens * context_halves // 2,
            num_buffers=num_buffers,
        ): None
        for query_halves in (2, 1, 4)
        for context_halves in (2, 1, 4)
        for num_buffers in (base.num_buffers, 2, 4)
    }
    for tiles in sizes:
        try:
            tiles.check(block_size)
        except ValueError:
            continue
        yield tiles


def power_of_two(limit: int) -> int:
    """The largest one up to `limit` >= 1."""
    return 1 << (max(1, limit).bit_length() - 1)


def vmem_bytes(
    q: jax.Array | jax.ShapeDtypeStruct, kv_blocks: jax.Array | jax.ShapeDtypeStruct, tiles: Tiles
) -> int:
    """VMEM of the kernel's scratch and of the largest values between, but for scales."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, _, double = kv_blocks.shape
    itemsize, lanes, tokens = q.dtype.itemsize, max(head_dim, LANES), tiles.query_tokens
    words = -(-num_heads * itemsize // 4)
    rows = 4 * words // itemsize * tokens
    part_rows = min(num_heads // num_kv_heads * tokens, max(256, tokens))
    kv_bytes = num_kv_heads * tiles.context_tokens * double * kv_blocks.dtype.itemsize
    return (
        tiles.num_buffers * kv_bytes
        + 4 * tokens * (-(-words // 8) * 8) * lanes * 4  # queries and output, twice each
        + rows * (lanes * (4 + itemsize) + 2 * LANES * 4)  # sums, and queries as rows
        + 3 * part_rows * tiles.context_tokens * 4  # scores, probabilities and what is between
    )


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
    """See `kernels_pallas.paged_attention.paged_attention`.

    Args:
        tiles: instead of `default_tiles`.
    Raises:
        NotImplementedError: head_dim neither 64 nor a multiple of 128, a block size that is not
            one of `BLOCK_SIZES`.
        ValueError: tiles that break their rules.
    """
    check_supported(q, kv_blocks, device_kind=device_kind)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = kv_dims(kv_blocks.shape)
    max_rows = block_table.shape[0]
    if tiles is None:
        tiles = default_tiles(q, kv_blocks, block_table, device_kind=device_kind)
    tiles.check(block_size)
    padded = max(num_tokens, SHORT)
    statics = Statics(
        num_tokens=padded,
        max_q_len=num_tokens,
        max_rows=max_rows,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        value_lanes=max(LANES, head_dim),
        scale=float(scale),
        sliding_window=sliding_window,
        query_tokens=min(tiles.query_tokens, power_of_two(padded)),
        context_tokens=tiles.context_tokens,
        num_buffers=tiles.num_buffers,
        num_cores=tiles.num_cores,
        is_quantised=kv_scales is not None,
        dtype=q.dtype,
    )
    # Rows past num_rows have no tokens, whatever the arrays say.
    real_rows = jnp.minimum(jnp.arange(max_rows + 1, dtype=jnp.int32), num_rows)
    cu_q_lens = cu_q_lens[real_rows]
    shares = _share_decodes(context_lens, cu_q_lens, statics)
    # Lanes past H multiply V where it shares a tile of lanes with K.
    heads = jnp.pad(
        q.astype(jnp.float32),
        (
            (0, padded - num_tokens),
            (0, statics.num_words * statics.packing - num_heads),
            (0, statics.value_lanes - head_dim),
        ),
    )
    queries = pack(jnp.split(heads, statics.packing, axis=1))
    out, *parts = _call(
        statics, context_lens, cu_q_lens, shares, _table(block_table), queries, kv_blocks,
        kv_scales, limit=VMEM_BYTES.get(device_kind or "", LEAST_VMEM_BYTES),
    )  # fmt: skip
    out = jnp.concatenate(unpack(out), axis=1)[:num_tokens, :num_heads]
    is_real = jnp.arange(num_tokens, dtype=jnp.int32) < cu_q_lens[-1]
    out = jnp.where(is_real[:, None, None], out, 0.0)[..., statics.value_lanes - head_dim :]
    out = out.astype(q.dtype)
    if not parts:
        return out
    return _put_together(out, parts, shares, context_lens, cu_q_lens, statics)


def check_supported(
    tokens: jax.Array | jax.ShapeDtypeStruct,
    kv_blocks: jax.Array | jax.ShapeDtypeStruct,
    *,
    device_kind: str | None,
) -> None:
    """What both kernels of this backend take, on any TPU: of `tokens`, queries or keys, all.

    Raises:
        NotImplementedError: others; a tile of the cache would not be filled by whole lanes and
            rows.
    """
    del tokens, device_kind
    _, block_size, _, head_dim = kv_dims(kv_blocks.shape)
    if block_size not in BLOCK_SIZES:
        raise NotImplementedError(
            f"pallas_tpu: block_size must be one of {BLOCK_SIZES}, got {block_size=}"
        )
    if head_dim != LANES // 2 and head_dim % LANES:
        raise NotImplementedError(
            f"pallas_tpu: head_dim must be 64 or a multiple of 128, got {head_dim=}"
        )


def _table(block_table: jax.Array) -> jax.Array:
    """[R, M] -> [R, ceil(M / 128), 1, 128]: pieces that a copy to SMEM takes whole."""
    max_rows, max_blocks = block_table.shape
    padding = -max_blocks % TABLE_IDS
    table = jnp.pad(block_table, ((0, 0), (0, padding)))
    return table.reshape(max_rows, -1, 1, TABLE_IDS)


def _first_tile(context_lens: jax.Array, statics: Statics) -> jax.Array:
    """The first context tile that a decode sees, per row."""
    if statics.sliding_window is None:
        return jnp.zeros_like(context_lens)
    first = jnp.maximum(context_lens - statics.sliding_window, 0)
    return first // statics.context_tokens


def _share_decodes(context_lens: jax.Array, cu_q_lens: jax.Array, statics: Statics) -> jax.Array:
    """[num_cores * 3]: first row, its first context tile and number of steps, for each core.

    The steps of all decodes in a line, cut into equal shares: one long row is split as well as
    many short ones are.
    """
    is_decode = cu_q_lens[1:] - cu_q_lens[:-1] == 1
    first_tile = _first_tile(context_lens, statics)
    end_tile = -(-context_lens // statics.context_tokens)
    ends = jnp.cumsum(jnp.where(is_decode, end_tile - first_tile, 0), dtype=jnp.int32)
    cuts = ends[-1] * jnp.arange(statics.num_cores + 1, dtype=jnp.int32) // statics.num_cores
    rows = jnp.sum(ends[None, :] <= cuts[:-1, None], axis=1, dtype=jnp.int32)
    rows = jnp.minimum(rows, statics.max_rows - 1)
    c_tiles = end_tile[rows] - (ends[rows] - cuts[:-1])
    return jnp.stack([rows, c_tiles, cuts[1:] - cuts[:-1]], axis=1).reshape(-1)


def _put_together(
    out: jax.Array,
    parts: list[jax.Array],
    shares: jax.Array,
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    statics: Statics,
) -> jax.Array:
    """`out` with the decode that the second core's share begins in the middle of, if there is one.

    Args:
        parts: numerators [2, N, lanes], and [2, 2, N, 128] maxima and denominators.
    """
    numerators, stats = parts
    row, c_tile, num_steps = shares[3:]
    is_cut = (num_steps > 0) & (c_tile > _first_tile(context_lens, statics)[row])
    maxima, denominators = stats[:, 0, :, :1], stats[:, 1, :, :1]
    weights = jnp.exp(maxima - maxima.max(0, keepdims=True))
    whole = (numerators * weights).sum(0) / (denominators * weights).sum(0)
    whole = whole[:, statics.value_lanes - statics.head_dim :].astype(out.dtype)
    token = cu_q_lens[row]
    return out.at[token].set(jnp.where(is_cut, whole, out[token]))


def _call(
    statics: Statics,
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    shares: jax.Array,
    table: jax.Array,
    queries: jax.Array,
    kv_blocks: jax.Array,
    kv_scales: jax.Array | None,
    *,
    limit: int,
) -> list[jax.Array]:
    """The kernel: out [T, num_words, lanes], and the parts of a cut decode if there are cores."""
    operands = [context_lens, cu_q_lens, shares, table, queries, kv_blocks]
    outputs = [jax.ShapeDtypeStruct(queries.shape, queries.dtype)]
    if kv_scales is not None:
        operands.append(kv_scales)
    if statics.num_cores > 1:
        num_heads, lanes = statics.num_heads, statics.value_lanes
        for shape in ((num_heads, lanes), (2, num_heads, LANES)):
            outputs.append(jax.ShapeDtypeStruct((statics.num_cores, *shape), jnp.float32))
    has = {
        "scales": kv_scales is not None,
        "part_out": statics.num_cores > 1,
        "part_stats": statics.num_cores > 1,
    }
    scratch = {name: s for name, s in _scratch(statics, kv_blocks, kv_scales).items() if s}
    names = [n for n in Refs._fields if has.get(n, n in scratch or n not in _OPTIONAL)]

    def make_refs(*refs: Any) -> Refs:
        given = dict(zip(names, refs, strict=True))
        return Refs(*(given.get(name) for name in Refs._fields))

    found: list[jax.Array] = pl.pallas_call(
        partial(attention_kernel, statics, make_refs),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(statics.num_cores,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (len(operands) - 3),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(outputs),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=limit
        ),
        name="paged_attention",
    )(*operands)
    return found


_OPTIONAL = ("scales_buffer", "scales_rows", "scales_sem")


def _scratch(statics: Statics, kv_blocks: jax.Array, kv_scales: jax.Array | None) -> dict[str, Any]:
    """What the kernel keeps, by the name in `Refs`; None where it is not needed."""
    tokens, lanes, num_words = statics.query_tokens, statics.value_lanes, statics.num_words
    rows = num_words * statics.packing * tokens
    word = jnp.float32 if statics.packing == 1 else jnp.uint32
    buffers, context = statics.num_buffers, statics.context_tokens
    num_kv_heads = statics.num_kv_heads
    scales_buffer = scales_rows = scales_sem = None
    if kv_scales is not None:
        width = kv_scales.shape[-1]
        scales_buffer = pltpu.VMEM((buffers, context // SCALE_RUN, 1, width), jnp.float32)
        scales_rows = pltpu.VMEM((width // SCALE_RUN, context), jnp.float32)
        scales_sem = pltpu.SemaphoreType.DMA((buffers,))
    return {
        "table_ids": pltpu.SMEM((2, 1, TABLE_IDS), jnp.int32),
        "kv_buffer": pltpu.VMEM(
            (buffers, num_kv_heads, context, kv_blocks.shape[-1]), kv_blocks.dtype
        ),
        "scales_buffer": scales_buffer,
        "scales_rows": scales_rows,
        "q_buffer": pltpu.VMEM((2, tokens, num_words, lanes), word),
        "q_rows": pltpu.VMEM((rows, lanes), statics.dtype),
        "numerator": pltpu.VMEM((rows, lanes), jnp.float32),
        "maximum": pltpu.VMEM((rows, LANES), jnp.float32),
        "denominator": pltpu.VMEM((rows, LANES), jnp.float32),
        "out_buffer": pltpu.VMEM((2, tokens, num_words, lanes), word),
        "table_sem": pltpu.SemaphoreType.DMA((2,)),
        "kv_sem": pltpu.SemaphoreType.DMA((buffers,)),
        "scales_sem": scales_sem,
        "q_sem": pltpu.SemaphoreType.DMA((2,)),
        "out_sem": pltpu.SemaphoreType.DMA((2,)),
    }
