"""The two Hopper kernels of paged attention: tiles of K and V against query rows, and combining.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.jax_versions import Ref, transposed
from kernels_pallas.paged_attention.gpu_layout import scale_width
from kernels_pallas.paged_attention.gpu_producer import (
    BF16,
    F32,
    Loads,
    Memory,
    Segment,
    State,
    heads_of,
    memory_of,
    segment_at,
    walk,
)
from kernels_pallas.paged_attention.gpu_units import (
    CONTEXT,
    FIRST_RUN,
    HIGH,
    LOW,
    POSITION,
    ROWS,
    TOKEN,
    Geometry,
    Plan,
)

WGMMA = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
MASKED = -1e30  # a row's maximum before it sees anything; finite, so differences are never NaN
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# Of a program that combines: columns of H, and parts loaded at once.
COMBINED_COLUMNS, COMBINED_PARTS = 64, 4
# Rows are reduced within a warp, so nothing is exchanged through shared memory.
PARAMETERS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512)


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

    def body(q_ref: Ref, cache: list[Ref], table: Ref, entries: Ref, first: Ref, sizes: Ref,
             out: Ref, part: Ref, part_lse: Ref, memory: Memory) -> None:  # fmt: skip
        group = lax.axis_index("warpgroup")
        load = Loads(geo, q_ref, cache, table, entries, memory)
        compute = _Compute(
            geo, entries, out, part, part_lse, memory, scale * math.log2(math.e), sliding_window
        )

        @pl.when(group == consumers)
        def _produce() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            walk(geo, entries, first, sizes, load.segment)

        @pl.when(group < consumers)
        def _consume() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            walk(geo, entries, first, sizes, lambda *at: compute.segment(group, *at))
            plgpu.wait_smem_to_gmem(0)

    part, part_lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((2 * programs, consumers, ROWS, head_dim), F32),
            jax.ShapeDtypeStruct((2 * programs, consumers, ROWS), F32),
        ),
        scratch_types=(memory_of(geo, kv_blocks.dtype, interpreted),),
        grid=(programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
    )(q, cache, block_table, *plan, out)
    combine(part, part_lse, plan, out, geo)


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

        m, denom, acc = lax.fori_loop(0, segment.num_tiles, step, nothing_seen(geo.head_dim))
        safe = jnp.where(denom == 0.0, 1.0, denom)  # 0: nothing seen, and acc is 0
        acc = acc / lax.broadcast_in_dim(safe, acc.shape, [0])
        staged = memory.q_raw if memory.out is None else memory.out
        # Output of the segment before may still be on its way out of the same memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(segment.is_whole)
        def _write() -> None:
            write_rows(geo, self.entries, segment, consumer, acc, staged, self.out, slice(None))

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
        first = None
        if self.sliding_window is not None:
            own = self.entries[segment.entry, POSITION] + self.entries[segment.entry, LOW]
            first = own - (self.sliding_window - 1)
        return _Seen(geo, lowest, lowest + (geo.queries - 1), first, context, self.sliding_window)

    def _tile(
        self, consumer: jax.Array, slot: jax.Array, seen: "_Seen", base: jax.Array, state: State
    ) -> State:
        """The online softmax over one tile, whose first token is at position `base`."""
        geo, memory = self.geo, self.memory
        m, denom, acc = state
        plgpu.barrier_wait(memory.k_full.at[slot])
        keys, k_scales = self._ready(consumer, slot, memory.k, memory.k_scales)
        scores = product(memory.q.at[consumer], transposed(keys), geo.columns)
        if k_scales is not None:
            scores = scores * k_scales
        plgpu.barrier_arrive(memory.k_free.at[slot])
        scores = seen.masked(scores, base)

        new_m = jnp.maximum(m, scores.max(axis=1) * self.scale)
        probs = jnp.exp2(scores * self.scale - lax.broadcast_in_dim(new_m, scores.shape, [0]))
        decay = jnp.exp2(m - new_m)
        denom = denom * decay + probs.sum(axis=1)

        plgpu.barrier_wait(memory.v_full.at[slot])
        values, v_scales = self._ready(consumer, slot, memory.v, memory.v_scales)
        self._clean_values(consumer, values, seen, base)
        if v_scales is not None:
            probs = jnp.where(probs == 0.0, 0.0, probs * v_scales)  # a hidden token's may be NaN
        weights: Any = probs.astype(BF16)
        if memory.probs is not None:
            memory.probs[consumer] = weights
            plgpu.commit_smem()
            weights = memory.probs.at[consumer]
        gained = product(weights, values, geo.head_dim)
        plgpu.barrier_arrive(memory.v_free.at[slot])
        # The decay and the addition are one instruction, so a separate sum costs only registers.
        return new_m, denom, acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + gained

    def _ready(
        self, consumer: jax.Array, slot: jax.Array, tiles: Ref, scales: Ref | None
    ) -> tuple[Ref, jax.Array | None]:
        """A tile of K or V [columns, H] in bfloat16, in which numbers of eight bits are exact, and
        its scales by column.
        """
        stored, wide = tiles.at[slot], self.memory.wide
        if wide is None or scales is None:
            return stored, None
        # Scales are read here and not where they are used: the commit below then orders this read,
        # too, before the copy that will overwrite them.
        by_column = self._by_column(scales.at[slot])
        numbers = plgpu.load(stored, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        if stored.dtype != jnp.int8:
            numbers = numbers.astype(F32)  # there is no direct conversion
        wide.at[consumer][...] = numbers.astype(BF16)
        plgpu.commit_smem()
        return wide.at[consumer], by_column

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

    def _clean_values(
        self, consumer: jax.Array, values: Ref, seen: "_Seen", base: jax.Array
    ) -> None:
        """Zero the values past the context and before the window of all of the unit's queries: they
        may be NaN, and a probability of 0 does not help.
        """
        geo = self.geo
        is_edge = base + geo.tile_tokens > seen.context
        if seen.first is not None:
            is_edge |= base < seen.first

        def clean() -> None:
            lines = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=WGMMA)
            position = base + token_of(geo, lines)
            is_valid = position < seen.context
            if seen.first is not None:
                is_valid &= position >= seen.first
            kept = plgpu.load(values, layout=WGMMA)
            values[...] = jnp.where(is_valid, kept, jnp.zeros_like(kept))
            plgpu.commit_smem()

        if geo.consumers == 1 or self.memory.wide is not None:
            pl.when(is_edge)(clean)
            return

        @pl.when(is_edge)
        def _clean_shared() -> None:
            pl.when(consumer == 0)(clean)
            plgpu.barrier_arrive(self.memory.v_clean)
            plgpu.barrier_wait(self.memory.v_clean)


class _Seen(NamedTuple):
    """Which positions the rows of one consumer see."""

    geo: Geometry
    lowest: jax.Array  # position of its first query
    highest: jax.Array  # of its last
    first: jax.Array | None  # that a query of the unit, all consumers', sees; None: no window
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

    result: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, width), F32))
    return result


def write_rows(
    geo: Geometry,
    entries: Ref,
    segment: Segment,
    consumer: jax.Array,
    rows: jax.Array,
    staged: Ref,
    out: Ref,
    columns: Any,
) -> None:
    """Send finished rows [64, H], or the part of H in `columns`, to the tokens that are the unit's
    own; the caller waits.
    """
    staged[consumer] = rows.astype(BF16)
    plgpu.commit_smem()
    first = consumer * geo.queries
    token = entries[segment.entry, TOKEN] + first
    low, high = entries[segment.entry, LOW], entries[segment.entry, HIGH]
    for query in range(geo.queries):
        lines = pl.ds(query * geo.rows_per_query, geo.rows_per_query)

        def send(query: int = query, lines: Any = lines) -> None:
            plgpu.copy_smem_to_gmem(
                staged.at[consumer, lines], out.at[token + query, heads_of(geo, segment), columns]
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
            columns = pl.ds(lax.axis_index("columns") * COMBINED_COLUMNS, COMBINED_COLUMNS)

            def load(other: jax.Array) -> tuple[jax.Array, jax.Array]:
                """lse [64] and rows of another program's part; past the last one, weightless."""
                found = jnp.minimum(other, last)
                place = 2 * found + (found == program - 1).astype(jnp.int32)
                lse = plgpu.load(part_lse.at[place, consumer], layout=BY_ROW, optimized=False)
                rows = plgpu.load(
                    part.at[place, consumer, :, columns], layout=WGMMA, optimized=False
                )
                return lse + jnp.where(other <= last, 0.0, MASKED), rows

            def step(i: jax.Array, state: State) -> State:
                m, denom, acc = state
                # All on their way before the first is needed: latency is what this loop costs.
                parts = [
                    load(program - 1 + i * COMBINED_PARTS + ahead)
                    for ahead in range(COMBINED_PARTS)
                ]
                for lse, rows in parts:
                    new_m = jnp.maximum(m, lse)
                    decay, weight = jnp.exp2(m - new_m), jnp.exp2(lse - new_m)
                    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                    acc = acc + rows * lax.broadcast_in_dim(weight, acc.shape, [0])
                    m, denom = new_m, denom * decay + weight
                return m, denom, acc

            rounds = lax.div(last - program + (1 + COMBINED_PARTS), jnp.int32(COMBINED_PARTS))
            _, denom, acc = lax.fori_loop(0, rounds, step, nothing_seen(COMBINED_COLUMNS))
            acc = acc / lax.broadcast_in_dim(denom, acc.shape, [0])
            write_rows(geo, entries, segment, consumer, acc, staged, out, columns)
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        scratch_types=(plgpu.SMEM((geo.consumers, ROWS, COMBINED_COLUMNS), BF16),),
        grid=(geo.programs - 1, geo.head_dim // COMBINED_COLUMNS),
        grid_names=("cut", "columns"),
        num_threads=geo.consumers,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
    )(part, part_lse, *plan, out)


def nothing_seen(width: int) -> State:
    """Maximum, denominator and numerator of the online softmax before its first tile."""
    return (
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, F32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), F32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS, width), F32), WGMMA),
    )


def quotient(x: jax.Array, divisor: int) -> jax.Array:
    """x // divisor for x >= 0, which the compiler cannot know; a shift where it can be one."""
    if divisor & (divisor - 1) == 0:
        return lax.shift_right_logical(x, jnp.full_like(x, divisor.bit_length() - 1))
    return lax.div(x, jnp.full_like(x, divisor))
