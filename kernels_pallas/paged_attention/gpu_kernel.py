"""The two Hopper kernels of paged attention: tiles of K and V against query rows, and the combining.

Owns: what runs on the chip. `attend` is a persistent kernel of one producer warpgroup, which walks
block tables and issues TMA copies several tiles ahead, and `consumers` warpgroups, which compute an
online softmax with wgmma:

      producer   table -> copies of K | V  ---->  ring of stages in shared memory
      consumer   q, K -> scores -> softmax -> probabilities, V -> output rows       (each 64 rows)

`combine` merges the parts of units that several programs shared. In: a `Plan`. Out: output rows.
Must not know: how units were chosen.

Decodes: a consumer's 64 rows are the query heads of `heads` kv heads of one token, and its columns
are tokens times heads, so one copy brings all these heads of a block. Scores of a query with
another head's keys are masked. A wgmma has 64 rows anyway: this costs nothing and makes the copies
large. Prompts: the rows are queries times heads of one kv head; consumers share K and V.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.jax_versions import transposed
from kernels_pallas.paged_attention.gpu_units import (
    CONTEXT,
    FIRST_RUN,
    HIGH,
    LOW,
    NEXT,
    NUM_TILES,
    POSITION,
    ROW,
    ROWS,
    START,
    TOKEN,
    Geometry,
    Plan,
)

Ref = Any  # a reference to device memory: Pallas gives them no public type
State = tuple[jax.Array, ...]

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # what wgmma reads: 16 bit
WGMMA = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
MASKED = -1e30  # a row's maximum before it sees anything; finite, so differences are never NaN
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# Rows are reduced within a warp, so nothing is exchanged through shared memory.
PARAMETERS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512)
BF16, F32 = jnp.bfloat16, jnp.float32


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


def attend(
    q: jax.Array,
    kv_blocks: jax.Array,
    kv_scales: jax.Array | None,
    block_table: jax.Array,
    plan: Plan,
    out: Ref,
    *,
    geometry: Geometry,
    scale: float,
    sliding_window: int | None,
    interpreted: bool,
) -> None:
    """One pass over the units of a plan: writes their tokens of `out`, [T, N, H] like q.

    Args:
        kv_blocks: [P, 2, K, S, H].
        kv_scales: None, or [P, 2, K, width]; see `scale_width`.
        out: a reference to the array, which both passes of a step fill.
        scale: > 0.
        interpreted: the simulator multiplies no registers: probabilities go through shared memory.
    """
    geo = geometry
    head_dim, programs, consumers = geo.head_dim, geo.programs, geo.consumers
    cache = [kv_blocks.reshape(-1, geo.run_rows, head_dim)]
    if kv_scales is not None:
        cache.append(kv_scales.reshape(-1, geo.heads, scale_width(geo.run)))
    walk = _Walk(geo)

    def body(q_ref: Ref, cache: list[Ref], table: Ref, entries: Ref, first: Ref, sizes: Ref,
             out: Ref, part: Ref, part_lse: Ref, memory: Memory) -> None:  # fmt: skip
        group = lax.axis_index("warpgroup")
        load = _Loads(geo, q_ref, cache, table, entries, memory)
        compute = _Compute(
            geo, entries, out, part, part_lse, memory, scale * math.log2(math.e), sliding_window
        )

        @pl.when(group == consumers)
        def _produce() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            walk(entries, first, sizes, load.segment)

        @pl.when(group < consumers)
        def _consume() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            walk(entries, first, sizes, lambda *at: compute.segment(group, *at))
            plgpu.wait_smem_to_gmem(0)

    part, part_lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((2 * programs, consumers, ROWS, head_dim), F32),
            jax.ShapeDtypeStruct((2 * programs, consumers, ROWS), F32),
        ),
        scratch_types=(_memory(geo, kv_blocks.dtype, interpreted),),
        grid=(programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
    )(q, cache, block_table, *plan, out)
    combine(part, part_lse, plan, out, geo)


def _memory(geo: Geometry, kv_dtype: jnp.dtype, interpreted: bool) -> Memory:
    rows = (geo.consumers, ROWS, geo.head_dim)
    tiles = (geo.stages, geo.columns, geo.head_dim)
    is_quantised = kv_dtype != BF16
    arrivals = geo.runs * (1 + is_quantised)
    transforms = SWIZZLED
    if is_quantised:
        transforms = (
            plgpu.TilingTransform((8, geo.head_dim)), plgpu.SwizzleTransform(geo.head_dim)
        )  # fmt: skip
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


class _Walk:
    """The segments of this program, in order; every warpgroup walks them by itself."""

    def __init__(self, geo: Geometry) -> None:
        self.geo = geo

    def __call__(
        self,
        entries: Ref,
        first: Ref,
        sizes: Ref,
        visit: Callable[[Segment, jax.Array, jax.Array], None],
    ) -> None:
        """Calls `visit(segment, number, tile)`: the how-manieth segment it is, and its first tile,
        both counted within this program.
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
            unit_end = entries[entry, START] + segment.unit_tiles * self.geo.head_steps
            return at, jnp.where(at < unit_end, entry, entries[entry, NEXT]), number + 1

        state = (begin, first[program], jnp.int32(0))
        lax.while_loop(lambda state: state[0] < end, step, state)


def segment_at(entries: Ref, entry: jax.Array, at: jax.Array, end: jax.Array) -> Segment:
    """The segment that starts with tile `at` of all, which is in `entry`, and stops before `end`."""
    unit_tiles = entries[entry, NUM_TILES]
    local = at - entries[entry, START]
    head_step = lax.div(local, unit_tiles)
    first_tile = local - head_step * unit_tiles
    num_tiles = jnp.minimum(unit_tiles - first_tile, end - at)
    return Segment(entry, head_step, first_tile, num_tiles, unit_tiles)


class _Loads(NamedTuple):
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
            sources = self._runs(segment, row, first_run + i * geo.runs)
            for full, free, tiles, scales, offset in (
                (memory.k_full, memory.k_free, memory.k, memory.k_scales, 0),
                (memory.v_full, memory.v_free, memory.v, memory.v_scales, self._head_runs),
            ):
                pl.when(tile + i >= geo.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
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

    def _runs(self, segment: Segment, row: jax.Array, first: jax.Array) -> list[jax.Array]:
        """Where the K of one tile lies in `cache`."""
        geo = self.geo
        per_block = geo.block_size // geo.run
        found = []
        for index in range(geo.runs):
            block = lax.div(first + index, jnp.int32(per_block))
            part = lax.rem(first + index, jnp.int32(per_block))
            # Past the context the table is padding, and past the table there is nothing to ask.
            block_id = self.table[row, jnp.minimum(block, self.table.shape[1] - 1)]
            first_row = segment.head_step * (geo.heads * geo.block_size)
            run = lax.div(first_row, jnp.int32(geo.run_rows)) + part
            found.append(block_id * (2 * self._head_runs) + run)
        return found

    def _queries(self, segment: Segment, number: jax.Array) -> None:
        geo, memory = self.geo, self.memory
        token = self.entries[segment.entry, TOKEN]
        for consumer in range(geo.consumers):
            pl.when(number > 0)(lambda w=consumer: plgpu.barrier_wait(memory.q_free.at[w]))
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


class _Compute(NamedTuple):
    """A consumer."""

    geo: Geometry
    entries: Ref
    out: Ref
    part: Ref
    part_lse: Ref
    memory: Memory
    scale: float  # times log2(e): exponentials are powers of two
    sliding_window: int | None

    def segment(
        self, consumer: jax.Array, segment: Segment, number: jax.Array, tile: jax.Array
    ) -> None:
        geo, memory = self.geo, self.memory
        del number
        plgpu.barrier_wait(memory.q_full.at[consumer])
        memory.q[consumer] = plgpu.load(memory.q_raw.at[consumer], layout=WGMMA, optimized=False)
        plgpu.commit_smem()
        if memory.out is not None:
            plgpu.barrier_arrive(memory.q_free.at[consumer])
        first_run = self.entries[segment.entry, FIRST_RUN] + segment.first_tile * geo.runs
        seen = self._seen(segment, consumer)

        def step(i: jax.Array, state: State) -> State:
            slot = lax.rem(tile + i, jnp.int32(geo.stages))
            return self._tile(
                consumer, slot, seen, first_run * geo.run + i * geo.tile_tokens, state
            )

        m, denom, acc = lax.fori_loop(0, segment.num_tiles, step, nothing_seen(geo))
        safe = jnp.where(denom == 0.0, 1.0, denom)  # 0: nothing seen, and acc is 0
        acc = acc / lax.broadcast_in_dim(safe, acc.shape, [0])
        staged = memory.q_raw if memory.out is None else memory.out
        # Output of the segment before may still be on its way out of the same memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(segment.is_whole)
        def _write() -> None:
            write_rows(geo, self.entries, segment, consumer, acc, staged, self.out)

        @pl.when(jnp.logical_not(segment.is_whole))
        def _leave_part() -> None:
            place = 2 * lax.axis_index("program") + (segment.first_tile == 0).astype(jnp.int32)
            self.part[place, consumer] = acc
            seen_any = m > MASKED
            memory.lse[consumer] = jnp.where(seen_any, m + jnp.log2(safe), MASKED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.lse.at[consumer], self.part_lse.at[place, consumer])

        if memory.out is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory.q_free.at[consumer])

    def _seen(self, segment: Segment, consumer: jax.Array) -> "_Seen":
        geo = self.geo
        lowest = self.entries[segment.entry, POSITION] + consumer * geo.queries
        context = self.entries[segment.entry, CONTEXT]
        return _Seen(geo, lowest, lowest + (geo.queries - 1), context, self.sliding_window)

    def _tile(
        self, consumer: jax.Array, slot: jax.Array, seen: "_Seen", base: jax.Array, state: State
    ) -> State:
        """The online softmax over one tile, whose first token is at position `base`."""
        geo, memory = self.geo, self.memory
        m, denom, acc = state
        plgpu.barrier_wait(memory.k_full.at[slot])
        keys = self._widened(consumer, memory.k.at[slot])
        scores = product(memory.q.at[consumer], transposed(keys), geo.columns)
        if memory.k_scales is not None:
            scores = scores * self._by_column(memory.k_scales.at[slot])
        plgpu.barrier_arrive(memory.k_free.at[slot])
        scores = seen.masked(scores, base)

        new_m = jnp.maximum(m, scores.max(axis=1) * self.scale)
        probs = jnp.exp2(scores * self.scale - lax.broadcast_in_dim(new_m, scores.shape, [0]))
        decay = jnp.exp2(m - new_m)
        denom = denom * decay + probs.sum(axis=1)

        plgpu.barrier_wait(memory.v_full.at[slot])
        values = self._widened(consumer, memory.v.at[slot])
        self._clean_values(consumer, values, seen.context - base)
        if memory.v_scales is not None:
            # A hidden token's scale may be NaN.
            scaled = probs * self._by_column(memory.v_scales.at[slot])
            probs = jnp.where(probs == 0.0, 0.0, scaled)
        weights: Any = probs.astype(BF16)
        if memory.probs is not None:
            memory.probs[consumer] = weights
            plgpu.commit_smem()
            weights = memory.probs.at[consumer]
        gained = product(weights, values, geo.head_dim)
        plgpu.barrier_arrive(memory.v_free.at[slot])
        # The decay and the addition are one instruction, so a separate sum costs only registers.
        return new_m, denom, acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + gained

    def _widened(self, consumer: jax.Array, stored: Ref) -> Ref:
        """A tile of K or V [columns, H] in bfloat16; numbers of eight bits are exact in it."""
        if self.memory.wide is None:
            return stored
        numbers = plgpu.load(stored, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        if stored.dtype != jnp.int8:
            numbers = numbers.astype(F32)  # there is no direct conversion
        wide = self.memory.wide.at[consumer]
        wide[...] = numbers.astype(BF16)
        plgpu.commit_smem()
        return wide

    def _by_column(self, scales: Ref) -> jax.Array:
        """Scales [runs * heads, width] of a tile -> [64, columns]."""
        geo = self.geo
        pieces = []
        for index in range(geo.runs * geo.heads):
            by_column = WGMMA.reduce(0)
            piece = plgpu.load(scales.at[index, pl.ds(0, geo.run)], layout=by_column,
                               optimized=False)  # fmt: skip
            pieces.append(lax.broadcast_in_dim(piece, (ROWS, geo.run), [1]))
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)

    def _clean_values(self, consumer: jax.Array, values: Ref, num_valid: jax.Array) -> None:
        """Zero the values past the context, which may be NaN: a probability of 0 does not help."""
        geo = self.geo
        is_tail = num_valid < geo.tile_tokens

        def clean() -> None:
            lines = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=WGMMA)
            is_valid = token_of(geo, lines) < num_valid
            kept = plgpu.load(values, layout=WGMMA)
            values[...] = jnp.where(is_valid, kept, jnp.zeros_like(kept))
            plgpu.commit_smem()

        if geo.consumers == 1 or self.memory.wide is not None:
            pl.when(is_tail)(clean)
            return

        @pl.when(is_tail)
        def _clean_shared() -> None:
            pl.when(consumer == 0)(clean)
            plgpu.barrier_arrive(self.memory.v_clean)
            plgpu.barrier_wait(self.memory.v_clean)


class _Seen(NamedTuple):
    """Which positions the rows of one consumer see."""

    geo: Geometry
    lowest: jax.Array  # position of its first query
    highest: jax.Array  # of its last
    context: jax.Array
    sliding_window: int | None

    def masked(self, scores: jax.Array, base: jax.Array) -> jax.Array:
        """Scores [64, columns] of the tile at position `base`, -inf where hidden."""
        geo = self.geo
        last = base + (geo.tile_tokens - 1)
        is_cut = last > jnp.minimum(self.lowest, self.context - 1)
        if self.sliding_window is not None:
            is_cut |= base <= self.highest - self.sliding_window

        def cut(scores: jax.Array) -> jax.Array:
            rows = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA)
            columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
            position = base + token_of(geo, columns)
            own = self.lowest
            if geo.queries > 1:
                own = own + quotient(rows, geo.rows_per_query)
            visible = (position <= own) & (position < self.context)
            if self.sliding_window is not None:
                visible &= position > own - self.sliding_window
            return jnp.where(visible, scores, -jnp.inf)

        scores = lax.cond(is_cut, cut, lambda scores: scores, scores)
        if geo.heads == 1:
            return scores
        rows = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA)
        columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
        run = quotient(columns, geo.run)
        column_head = run - quotient(run, geo.heads) * geo.heads
        is_own = quotient(rows, geo.group) == column_head
        return jnp.where(is_own, scores, -jnp.inf)


def scale_width(run: int) -> int:
    """Scales that one head's run of tokens takes in memory: a copy brings 128 bytes at least."""
    return max(run, 32)


def token_of(geo: Geometry, column: jax.Array) -> jax.Array:
    """Which token of the tile a column belongs to."""
    if geo.heads == 1:
        return column
    return quotient(column, geo.run_rows) * geo.run + (column & (geo.run - 1))


def product(a: Any, b: Ref, width: int) -> jax.Array:
    """a [64, C] @ b [C, width] in float32, finished.

    The only place that waits for wgmma, which is asynchronous: reading the accumulator waits for
    it. The simulator does not model this, so nothing outside may hold an accumulator. Operands in
    shared memory must have been copied by TMA, or stored and then committed by this warpgroup.
    """

    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        result: jax.Array = acc[...]
        return result

    result: jax.Array = pl.run_scoped(multiply, plgpu.ACC((ROWS, width), F32))
    return result


def write_rows(
    geo: Geometry,
    entries: Ref,
    segment: Segment,
    consumer: jax.Array,
    rows: jax.Array,
    staged: Ref,
    out: Ref,
) -> None:
    """Send finished rows [64, H] to the tokens that are the unit's own; the caller waits."""
    staged[consumer] = rows.astype(BF16)
    plgpu.commit_smem()
    first = consumer * geo.queries
    token = entries[segment.entry, TOKEN] + first
    low, high = entries[segment.entry, LOW], entries[segment.entry, HIGH]
    for query in range(geo.queries):
        lines = pl.ds(query * geo.rows_per_query, geo.rows_per_query)

        def send(query: int = query, lines: Any = lines) -> None:
            plgpu.copy_smem_to_gmem(
                staged.at[consumer, lines], out.at[token + query, heads_of(geo, segment)]
            )

        pl.when((first + query >= low) & (first + query < high))(send)


def combine(part: jax.Array, part_lse: jax.Array, plan: Plan, out: Ref, geo: Geometry) -> None:
    """Merge the parts of every unit that was cut; each cut unit by the program at its first cut."""
    if geo.programs == 1:
        return

    def body(part: Ref, part_lse: Ref, entries: Ref, first: Ref, sizes: Ref, out: Ref,
             staged: Ref) -> None:  # fmt: skip
        consumer = lax.axis_index("warpgroup")
        program = lax.axis_index("cut") + 1
        share, total = sizes[0], sizes[1]
        at = program * share
        segment = segment_at(entries, first[program], at, total)
        begin = at - segment.first_tile
        # A later cut of the same unit finds more than a share before it.
        is_first_cut = (segment.first_tile > 0) & (segment.first_tile <= share)

        @pl.when((at < total) & is_first_cut)
        def _merge() -> None:
            last = lax.div(begin + segment.unit_tiles - 1, share)

            def step(other: jax.Array, state: State) -> State:
                m, denom, acc = state
                place = 2 * other + (other == program - 1).astype(jnp.int32)
                lse = plgpu.load(part_lse.at[place, consumer], layout=BY_ROW, optimized=False)
                rows = plgpu.load(part.at[place, consumer], layout=WGMMA, optimized=False)
                new_m = jnp.maximum(m, lse)
                decay, weight = jnp.exp2(m - new_m), jnp.exp2(lse - new_m)
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                acc = acc + rows * lax.broadcast_in_dim(weight, acc.shape, [0])
                return new_m, denom * decay + weight, acc

            _, denom, acc = lax.fori_loop(program - 1, last + 1, step, nothing_seen(geo))
            acc = acc / lax.broadcast_in_dim(denom, acc.shape, [0])
            write_rows(geo, entries, segment, consumer, acc, staged, out)
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        scratch_types=(plgpu.SMEM((geo.consumers, ROWS, geo.head_dim), BF16),),
        grid=(geo.programs - 1,),
        grid_names=("cut",),
        num_threads=geo.consumers,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
    )(part, part_lse, *plan, out)


def nothing_seen(geo: Geometry) -> State:
    """Maximum, denominator and numerator of the online softmax before its first tile."""
    return (
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, F32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), F32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS, geo.head_dim), F32), WGMMA),
    )


def quotient(x: jax.Array, divisor: int) -> jax.Array:
    """x // divisor for x >= 0, which the compiler cannot know; a shift where it can be one."""
    if divisor & (divisor - 1) == 0:
        return lax.shift_right_logical(x, jnp.full_like(x, divisor.bit_length() - 1))
    return lax.div(x, jnp.full_like(x, divisor))
