"""The producing half of the Hopper kernel: what a program has in shared memory, and who fills it.

Owns: the ring of stages and its barriers, the walk over a program's share of a `Plan`, and the
producer warpgroup, which follows block tables and issues TMA copies. In: references inside the
kernel. Out: full barriers. Must not know: what is computed from a tile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.jax_versions import Ref
from kernels_pallas.paged_attention.gpu_layout import scale_width
from kernels_pallas.paged_attention.gpu_units import (
    CONTEXT,
    FIRST_RUN,
    NEXT,
    NUM_TILES,
    ROW,
    ROWS,
    START,
    TOKEN,
    Geometry,
)

State = tuple[jax.Array, ...]
BF16, F32 = jnp.bfloat16, jnp.float32


def swizzled(columns: int, itemsize: int) -> tuple[Any, ...]:
    """How rows of this many numbers lie where wgmma reads them, or without bank conflicts."""
    tiling: Any = plgpu.TilingTransform  # abstract in the eyes of the type checker only
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(columns * itemsize)


SWIZZLED = swizzled(64, 2)


class Segment(NamedTuple):
    """A run of tiles of one unit that one program computes; scalars."""

    entry: jax.Array
    head_step: jax.Array
    first_tile: jax.Array
    num_tiles: jax.Array
    unit_tiles: jax.Array

    @property
    def is_whole(self) -> jax.Array:
        return self.num_tiles == self.unit_tiles


class Memory(NamedTuple):
    """Shared memory and barriers of a program."""

    q_raw: Ref  # [consumers, 64, H]: as copied; a copy of few heads cannot be swizzled
    q: Ref  # [consumers, 64, H] swizzled
    out: Ref | None  # [consumers, 64, H]; None: it takes the place of q_raw
    lse: Ref  # [consumers, 64] float32
    k: Ref  # [stages, columns, H], of the cache's dtype
    v: Ref
    k_scales: Ref | None  # [stages, runs * heads, scale_width] float32, of a quantised cache
    v_scales: Ref | None
    wide: Ref | None  # [consumers, columns, H]: such a K or V as wgmma takes it
    probs: Ref | None  # [consumers, 64, columns], where they cannot stay in registers
    q_full: Ref  # barriers, per consumer
    q_free: Ref
    k_full: Ref  # per stage
    v_full: Ref
    k_free: Ref
    v_free: Ref
    v_clean: Ref


def memory_of(geo: Geometry, kv_dtype: jnp.dtype, interpreted: bool) -> Memory:
    """What a program allocates; `interpreted` adds memory for probabilities."""
    rows = (geo.consumers, ROWS, geo.head_dim)
    tiles = (geo.stages, geo.columns, geo.head_dim)
    is_quantised = kv_dtype != BF16
    arrivals = geo.runs * (1 + is_quantised)
    # A quantised tile is read by ordinary loads only: its whole rows of H bytes are swizzled.
    transforms = swizzled(geo.head_dim, 1) if is_quantised else SWIZZLED
    scales = (geo.stages, geo.runs * geo.heads, scale_width(geo.run))
    wide = plgpu.SMEM((geo.consumers, *tiles[1:]), BF16, transforms=SWIZZLED)
    probs = plgpu.SMEM((geo.consumers, ROWS, geo.columns), BF16, transforms=SWIZZLED)
    return Memory(
        q_raw=plgpu.SMEM(rows, BF16),
        q=plgpu.SMEM(rows, BF16, transforms=SWIZZLED),
        out=plgpu.SMEM(rows, BF16) if geo.prefetches_queries else None,
        lse=plgpu.SMEM(rows[:2], F32),
        k=plgpu.SMEM(tiles, kv_dtype, transforms=transforms),
        v=plgpu.SMEM(tiles, kv_dtype, transforms=transforms),
        k_scales=plgpu.SMEM(scales, F32) if is_quantised else None,
        v_scales=plgpu.SMEM(scales, F32) if is_quantised else None,
        wide=wide if is_quantised else None,
        probs=probs if interpreted else None,
        q_full=plgpu.Barrier(num_arrivals=geo.queries, num_barriers=geo.consumers),
        q_free=plgpu.Barrier(num_barriers=geo.consumers),
        k_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=geo.stages),
        v_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=geo.stages),
        k_free=plgpu.Barrier(num_arrivals=geo.consumers, num_barriers=geo.stages),
        v_free=plgpu.Barrier(num_arrivals=geo.consumers, num_barriers=geo.stages),
        v_clean=plgpu.Barrier(num_arrivals=geo.consumers),
    )


def walk(
    geo: Geometry,
    entries: Ref,
    first: Ref,
    sizes: Ref,
    visit: Callable[[Segment, jax.Array, jax.Array], None],
) -> None:
    """Calls `visit(segment, number, tile)` for the segments of this program, in order.

    Every warpgroup walks them by itself. `number` counts segments and `tile` the tiles before this
    one, both within the program.
    """
    program = lax.axis_index("program")
    share, total = sizes[0], sizes[1]
    begin = program * share
    end = jnp.minimum(begin + share, total)

    def step(state: State) -> State:
        at, entry, number = state
        segment = segment_at(entries, entry, at, end)
        visit(segment, number, at - begin)
        at = at + segment.num_tiles
        unit_end = entries[entry, START] + segment.unit_tiles * geo.head_steps
        return at, jnp.where(at < unit_end, entry, entries[entry, NEXT]), number + 1

    def is_left(state: State) -> jax.Array:
        return state[0] < end

    state: State = (begin, first[program], jnp.int32(0))
    lax.while_loop(is_left, step, state)


def segment_at(entries: Ref, entry: jax.Array, at: jax.Array, end: jax.Array) -> Segment:
    """The segment from tile `at` of all, which is in `entry`, to the unit's end or `end`."""
    unit_tiles = entries[entry, NUM_TILES]
    local = at - entries[entry, START]
    head_step = lax.div(local, unit_tiles)
    first_tile = local - head_step * unit_tiles
    num_tiles = jnp.minimum(unit_tiles - first_tile, end - at)
    return Segment(entry, head_step, first_tile, num_tiles, unit_tiles)


class Loads(NamedTuple):
    """The producer: copies queries, keys and values into shared memory, as far ahead as it fits."""

    geo: Geometry
    q: Ref
    cache: list[Ref]  # [P * 2 * K * S / run_rows, run_rows, H], and scales likewise
    table: Ref
    entries: Ref
    memory: Memory

    def segment(self, segment: Segment, number: jax.Array, tile: jax.Array) -> None:
        geo, memory = self.geo, self.memory
        self._queries(segment, number)
        row = self.entries[segment.entry, ROW]
        first_run = self.entries[segment.entry, FIRST_RUN] + segment.first_tile * geo.runs

        def step(i: jax.Array, _: None) -> None:
            slot = lax.rem(tile + i, jnp.int32(geo.stages))
            # Before any wait, so that the table is not what a copy waits for.
            sources = self.runs(segment, row, first_run + i * geo.runs)
            for full, free, tiles, scales, offset in (
                (memory.k_full, memory.k_free, memory.k, memory.k_scales, 0),
                (memory.v_full, memory.v_free, memory.v, memory.v_scales, self._head_runs),
            ):
                pl.when(tile + i >= geo.stages)(partial(plgpu.barrier_wait, free.at[slot]))
                for index, source in enumerate(sources):
                    for cached, place, lines in zip(
                        self.cache, (tiles, scales), (geo.run_rows, geo.heads), strict=False
                    ):
                        plgpu.copy_gmem_to_smem(
                            cached.at[source + offset],
                            place.at[slot, pl.ds(index * lines, lines)],
                            full.at[slot],
                        )

        lax.fori_loop(0, segment.num_tiles, step, None)

    @property
    def _head_runs(self) -> int:
        """Runs in the K, or the V, of a block."""
        return self.geo.num_kv_heads * self.geo.block_size // self.geo.run_rows

    def runs(self, segment: Segment, row: jax.Array, first: jax.Array) -> list[jax.Array]:
        """Where the K of one tile lies in `cache`."""
        geo = self.geo
        per_block = geo.block_size // geo.run
        context = self.entries[segment.entry, CONTEXT]
        last_block = lax.div(jnp.maximum(context - 1, 0), jnp.int32(geo.block_size))
        found = []
        for index in range(geo.runs):
            block = lax.div(first + index, jnp.int32(per_block))
            part = lax.rem(first + index, jnp.int32(per_block))
            # A tile may end past the context, where the table is padding: its last block again.
            block_id = self.table[row, jnp.minimum(block, last_block)]
            first_row = segment.head_step * (geo.heads * geo.block_size)
            run = lax.div(first_row, jnp.int32(geo.run_rows)) + part
            found.append(block_id * (2 * self._head_runs) + run)
        return found

    def _queries(self, segment: Segment, number: jax.Array) -> None:
        geo, memory = self.geo, self.memory
        token = self.entries[segment.entry, TOKEN]
        for consumer in range(geo.consumers):
            pl.when(number > 0)(partial(plgpu.barrier_wait, memory.q_free.at[consumer]))
            for query in range(geo.queries):
                lines = pl.ds(query * geo.rows_per_query, geo.rows_per_query)
                plgpu.copy_gmem_to_smem(
                    self.q.at[token + (consumer * geo.queries + query), heads_of(geo, segment)],
                    memory.q_raw.at[consumer, lines],
                    memory.q_full.at[consumer],
                )


def heads_of(geo: Geometry, segment: Segment) -> Any:
    """The query heads of a unit, as a slice of N."""
    return pl.ds(segment.head_step * geo.rows_per_query, geo.rows_per_query)
