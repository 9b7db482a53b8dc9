"""Paged attention for Hopper GPUs, in Pallas Mosaic GPU: the door, and the choice of tiles.

Owns: what is supported, which passes a step needs, tile sizes. A step runs at most two passes of
one kernel (`gpu_kernel`), each over its own units (`gpu_units`):

    decode pass   rows with one query: all kv heads of a block per copy
    prompt pass   rows with several: 128 query rows per unit

so a chunk beside decodes never widens their tiles. A step of one token has one pass. That a step
has no more tokens than rows tells nothing: a chunk may lie in a bucket of many rows.

In and out: the contract in `paged_attention/__init__.py`. Must not know: how blocks were chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from kernels_pallas.interpret import is_interpreted
from kernels_pallas.paged_attention import gpu_kernel, gpu_layout
from kernels_pallas.paged_attention.gpu_layout import scale_width
from kernels_pallas.paged_attention.gpu_units import (
    ROWS,
    Geometry,
    Queries,
    every_query,
    plan,
    single_queries,
    tiles_of_queries,
)
from kernels_pallas.paged_attention.layout import KvDims, kv_dims

LAYOUT = gpu_layout


SMALL_BLOCKS = (16, 32, 64)  # larger ones are cut into runs of 128
HEAD_DIMS = (64, 128)
SHARED_BYTES = 227 * 1024 - 2048  # of a program on Hopper, less barriers and alignment
MAX_STAGES = 6
MAX_COLUMNS = 192
MAX_PARTS = 8
# Words of JAX's names of such devices.
HOPPER = ("H100", "H200", "H800", "H20", "H20-3e", "GH200")
# Streaming multiprocessors, by JAX's name of the device: a program for each. A device that is not
# here has DEFAULT_NUM_SMS: H100 SXM and NVL, H200, H800 SXM, GH200. More programs than
# multiprocessors wait for a second turn, fewer leave some idle; both are right.
NUM_SMS = {
    "NVIDIA H100 PCIe": 114,
    "NVIDIA H800 PCIe": 114,
    "NVIDIA H20": 78,
    "NVIDIA H20-3e": 78,
}
DEFAULT_NUM_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """What may be tuned; shapes decide the rest.

    Args:
        decode_columns: scores per query row and tile of the decode pass (tokens times kv heads).
        prompt_columns: tokens of a tile of the prompt pass.
        prompt_consumers: warpgroups of 64 query rows in the prompt pass.
        max_stages: bound on tiles in flight; shared memory is the other.
        num_programs: of the persistent grid.
    """

    decode_columns: int = 128
    prompt_columns: int = 64
    prompt_consumers: int = 2
    max_stages: int = MAX_STAGES
    num_programs: int = DEFAULT_NUM_SMS


def default_tiles(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_blocks: jax.Array | jax.ShapeDtypeStruct,
    block_table: jax.Array | jax.ShapeDtypeStruct,
    *,
    device_kind: str | None = None,
) -> Tiles:
    """Tiles of a call: the same for all shapes, whose heads and blocks decide the rest."""
    del q, kv_blocks, block_table
    return Tiles(num_programs=NUM_SMS.get(device_kind or "", DEFAULT_NUM_SMS))


def candidate_tiles(base: Tiles, block_size: int) -> Iterator[Tiles]:
    """`base` and its neighbours, each once, for a search; those too large fail to compile."""
    del block_size
    for decode_columns in (128, 64):
        for prompt_columns in (64, 128):
            for max_stages in (MAX_STAGES, 2, 3, 4):
                yield replace(
                    base,
                    decode_columns=decode_columns,
                    prompt_columns=prompt_columns,
                    max_stages=max_stages,
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
    """See `kernels_pallas.paged_attention.paged_attention`; `tiles` is for tuning."""
    check_supported(q, kv_blocks, device_kind=device_kind)
    dims = kv_dims(kv_blocks.shape)
    num_tokens, num_heads, _ = q.shape
    max_rows = context_lens.shape[0]
    group = num_heads // dims.num_kv_heads
    interpreted = is_interpreted()
    if tiles is None:
        tiles = default_tiles(q, kv_blocks, block_table, device_kind=device_kind)
        if interpreted:
            tiles = replace(tiles, num_programs=3)  # the simulator runs them one by one
    if scale <= 0:  # the kernel's is positive; the sign, or zero, loses nothing in the queries
        q, scale = q * jnp.sign(jnp.asarray(scale, q.dtype)), abs(scale) or 1.0

    is_real = jnp.arange(max_rows) < num_rows
    q_lens = jnp.where(is_real, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    decode = decode_geometry(
        dims, group, kv_blocks.dtype.itemsize, tiles, min(num_tokens, max_rows)
    )
    prompt = prompt_geometry(dims, group, kv_blocks.dtype.itemsize, tiles)
    padded, passes = passes_of(decode, prompt, context_lens, cu_q_lens, q_lens, num_tokens)
    q = jnp.pad(q, ((0, padded - num_tokens), (0, 0), (0, 0)))
    # Every token is written by one pass; the simulator's NaN shows one that is not.
    out = jax.new_ref(jnp.full_like(q, jnp.nan) if interpreted else jnp.empty_like(q))
    for geometry, queries in passes:
        units = plan(queries, geometry, padded, sliding_window)
        gpu_kernel.attend(
            q, kv_blocks, kv_scales, block_table, units, out, geometry=geometry, scale=scale,
            sliding_window=sliding_window, interpreted=interpreted,
        )  # fmt: skip
    return jax.freeze(out)[:num_tokens]


def passes_of(
    decode: Geometry,
    prompt: Geometry,
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    q_lens: jax.Array,
    num_tokens: int,
) -> tuple[int, list[tuple[Geometry, Queries]]]:
    """The passes of a step of `num_tokens`, which together write every token, and how many tokens
    q is padded to for them. q_lens [R] are 0 for padding rows.
    """
    rows = (context_lens, cu_q_lens, q_lens)
    if num_tokens == 1:
        return 1, [(decode, every_query(*rows, 1))]
    padded = max(num_tokens, prompt.unit_queries)
    return padded, [
        (decode, single_queries(*rows, padded)),
        (prompt, tiles_of_queries(*rows, padded, prompt.unit_queries)),
    ]


def is_hopper(device_kind: str) -> bool:
    """Whether this is JAX's name of such a device."""
    return not set(HOPPER).isdisjoint(device_kind.split())


def check_supported(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_blocks: jax.Array | jax.ShapeDtypeStruct,
    *,
    device_kind: str | None,
) -> None:
    """Everything this backend refuses, by device, shapes and dtypes.

    Raises:
        NotImplementedError: it is refused.
    """
    dims = kv_dims(kv_blocks.shape)
    group = q.shape[1] // dims.num_kv_heads
    size = dims.block_size
    for is_met, need in (
        (device_kind is None or is_hopper(device_kind), f"a Hopper GPU (wgmma), got {device_kind}"),
        (q.dtype == jnp.bfloat16, f"bfloat16 queries (wgmma has no float32), got {q.dtype}"),
        (
            size in SMALL_BLOCKS or size % 128 == 0,
            f"block_size in {SMALL_BLOCKS} or a multiple of 128, got {size}",
        ),
        (dims.head_dim in HEAD_DIMS, f"head_dim in {HEAD_DIMS}, got {dims.head_dim}"),
        (group <= ROWS, f"at most {ROWS} query heads per kv head, got {group}"),
    ):
        if not is_met:
            raise NotImplementedError(f"pallas_gpu: needs {need}; use the xla or reference backend")


def decode_geometry(
    dims: KvDims, group: int, itemsize: int, tiles: Tiles, num_entries: int
) -> Geometry:
    """As many kv heads per copy as 64 query rows and a tile have room for.

    Fewer where entries are few: the heads of a unit are cut together, and a unit in more than
    `MAX_PARTS` parts takes longer to combine than larger copies save.
    """
    most = max(1, num_entries * dims.num_kv_heads * MAX_PARTS // tiles.num_programs)
    run = min(dims.block_size, tiles.decode_columns)
    heads, runs = 1, tiles.decode_columns // run
    for more in range(2, dims.num_kv_heads + 1):
        if dims.num_kv_heads % more or more * group > ROWS or run < dims.block_size or more > most:
            continue
        width = more * run
        # Whole rows of 64 columns: values are masked 64 at a time.
        fitting = [n for n in range(1, 9) if width * n % ROWS == 0 and width * n <= MAX_COLUMNS]
        fitting = [n for n in fitting if width * n <= tiles.decode_columns] or fitting[:1]
        if fitting:
            heads, runs = more, fitting[-1]
    return _with_stages(
        Geometry(
            block_size=dims.block_size,
            group=group,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            consumers=1,
            heads=heads,
            queries=1,
            run=run,
            runs=runs,
            stages=1,
            prefetches_queries=False,
            programs=tiles.num_programs,
        ),
        itemsize,
        tiles,
    )


def prompt_geometry(dims: KvDims, group: int, itemsize: int, tiles: Tiles) -> Geometry:
    """One kv head; as many queries as fill the consumers' rows."""
    run = min(dims.block_size, tiles.prompt_columns)
    return _with_stages(
        Geometry(
            block_size=dims.block_size,
            group=group,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            consumers=tiles.prompt_consumers,
            heads=1,
            queries=ROWS // group,
            run=run,
            runs=tiles.prompt_columns // run,
            stages=1,
            prefetches_queries=True,
            programs=tiles.num_programs,
        ),
        itemsize,
        tiles,
    )


def _with_stages(geometry: Geometry, itemsize: int, tiles: Tiles) -> Geometry:
    """As many stages as shared memory holds, for a cache of this many bytes per number."""
    row_bytes = 2 * geometry.head_dim
    fixed = geometry.consumers * ROWS * row_bytes * (3 if geometry.prefetches_queries else 2)
    stage = 2 * geometry.columns * geometry.head_dim * itemsize
    if itemsize == 1:
        fixed += geometry.consumers * geometry.columns * row_bytes
        stage += 2 * 4 * geometry.runs * geometry.heads * scale_width(geometry.run)
    stages = min(tiles.max_stages, (SHARED_BYTES - fixed) // stage)
    return replace(geometry, stages=stages)
