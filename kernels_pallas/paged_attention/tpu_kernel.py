"""The Mosaic kernel of ragged paged attention on TPU: what one core does with its share of a step.

Owns: the copies and the online softmax. `tpu_walk.py` says in which order, `pallas_tpu.py` prepares
the operands.

Rows are of three kinds, by their q_len: a decode (1) is a tile of one query, the others are cut
into tiles of 16 or of `query_tokens` queries, with all query heads of a kv head as rows of one
matrix product. One pass per kind; kinds that a step lacks cost nothing. A pass is one flat loop
over steps (row, query tile, context tile), so that copies run ahead across tiles and rows alike:

      block ids     step i + B       HBM -> SMEM, 128 ids around the step's own
      K and V       step i + B - 1   HBM -> VMEM, one copy per block, B buffers
      computation   step i
      queries       the next query tile, output: the last two, while this one is computed

Only blocks that some query of the tile sees are copied. What a buffer holds beside them is left
from earlier steps, NaN at worst, so a step at an edge replaces scores and zeroes V.

Must not know: how blocks were chosen, the layout of the caller's arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.tpu_layout import LANES, SCALE_RUN
from kernels_pallas.paged_attention.tpu_walk import (
    Cursor,
    Kind,
    QueryTile,
    Scalar,
    Statics,
    Walk,
    div,
    kinds,
    rem,
)

MASKED = -1e30  # finite: exp(MASKED - MASKED) is 1, never NaN
TABLE_IDS = LANES  # block ids that one copy brings to SMEM
UNROLLED = 8  # copies started between two jumps


class Refs(NamedTuple):
    """Operands, results and scratch, in the order in which Pallas passes them.

    Unless said otherwise the operands are in HBM and the scratch in VMEM. `scales` and its buffers
    are None where nothing is quantised, the parts where there is one core.
    """

    context_lens: Any  # [R] SMEM
    cu_q_lens: Any  # [R + 1] SMEM, flat from num_rows on
    shares: Any  # [num_cores * 3] SMEM: first row, first context tile, steps of the decodes
    table: Any  # [R, ceil(M / 128), 1, 128]
    q: Any  # [T, num_words, lanes] words as `pack` makes them
    kv: Any  # [P, K, S, 2H]
    scales: Any  # [P, S / 16, 1, X]
    out: Any  # [T, num_words, lanes] words
    part_out: Any  # [num_cores, N, lanes] float32: numerator of a decode cut by the share's edge
    part_stats: Any  # [num_cores, 2, N, 128] float32: its maximum and denominator
    table_ids: Any  # [2, 1, 128] SMEM
    kv_buffer: Any  # [B, K, C, 2H]
    scales_buffer: Any  # [B, C / 16, 1, X]
    scales_rows: Any  # [X / 16, C]: a row of factors per kv head, of K and then of V
    q_buffer: Any  # [2, query_tokens, num_words, lanes]
    q_rows: Any  # [N' * query_tokens, lanes]: the queries of one head after the other
    numerator: Any  # [N' * query_tokens, lanes] float32, N' = num_words * packing
    maximum: Any  # [N' * query_tokens, 128] float32, equal along the lanes
    denominator: Any  # likewise
    out_buffer: Any  # [2, query_tokens, num_words, lanes]
    table_sem: Any  # [2]
    kv_sem: Any  # [B]
    scales_sem: Any  # [B]
    q_sem: Any  # [2]
    out_sem: Any  # [2]


class Pending(NamedTuple):
    """Query tiles done so far, and how many tokens the last two of them still write."""

    num_done: Scalar
    before_last: Scalar
    last: Scalar


@dataclass(frozen=True, slots=True)
class Pass:
    """One kind of rows, walked by one core."""

    statics: Statics
    kind: Kind
    refs: Refs

    @property
    def walk(self) -> Walk:
        refs = self.refs
        return Walk(self.statics, self.kind, refs.context_lens, refs.cu_q_lens, refs.shares)

    # The copies.

    def table_copy(self, cursor: Cursor, step: Scalar) -> Any:
        """The block ids of a step."""
        group = div(cursor.c_tile * self.statics.tile_blocks, TABLE_IDS)
        slot = step & 1
        return pltpu.make_async_copy(
            self.refs.table.at[cursor.row, group], self.refs.table_ids.at[slot],
            self.refs.table_sem.at[slot],
        )  # fmt: skip

    def block_copies(self, block_id: Scalar, index: Scalar, slot: Scalar) -> list[Any]:
        """K and V of a block, and their scales, to its place in a buffer."""
        refs, size = self.refs, self.statics.block_size
        place = refs.kv_buffer.at[slot, :, pl.ds(pl.multiple_of(index * size, size), size)]
        copies = [pltpu.make_async_copy(refs.kv.at[block_id], place, refs.kv_sem.at[slot])]
        if self.statics.is_quantised:
            runs = size // SCALE_RUN
            place = refs.scales_buffer.at[slot, pl.ds(index * runs, runs)]
            copies.append(
                pltpu.make_async_copy(refs.scales.at[block_id], place, refs.scales_sem.at[slot])
            )
        return copies

    def start_blocks(self, cursor: Cursor, step: Scalar) -> None:
        """Start the copies of a step, whose block ids are on their way."""
        tile_blocks = self.statics.tile_blocks
        self.table_copy(cursor, step).wait()
        first, end = self.walk.seen_blocks(cursor)
        slot = rem(step, self.statics.num_buffers)
        before = rem(cursor.c_tile * tile_blocks, TABLE_IDS)

        def start(index: Scalar) -> None:
            block_id = self.refs.table_ids[step & 1, 0, before + index]
            for copy in self.block_copies(block_id, index, slot):
                copy.start()

        _for_each(first, end, tile_blocks, start)

    def wait_blocks(self, cursor: Cursor, step: Scalar) -> None:
        """Wait for exactly the bytes that `start_blocks` asked for."""
        refs = self.refs
        first, end = self.walk.seen_blocks(cursor)
        slot = rem(step, self.statics.num_buffers)
        is_full = end - first == self.statics.tile_blocks

        @pl.when(is_full)
        def _() -> None:  # a semaphore counts bytes: one wait for the whole buffer
            whole = refs.kv_buffer.at[slot]
            pltpu.make_async_copy(whole, whole, refs.kv_sem.at[slot]).wait()
            if self.statics.is_quantised:
                whole = refs.scales_buffer.at[slot]
                pltpu.make_async_copy(whole, whole, refs.scales_sem.at[slot]).wait()

        @pl.when(~is_full)
        def _() -> None:
            def wait(index: Scalar) -> None:
                for copy in self.block_copies(jnp.int32(0), index, slot):
                    copy.wait()

            _loop(first, end, wait)

    def q_copy(self, tile: QueryTile, index: Scalar) -> Any:
        size = self.kind.query_tokens
        return pltpu.make_async_copy(
            self.refs.q.at[pl.ds(self.walk.tile_start(tile), size)],
            self.refs.q_buffer.at[index & 1, pl.ds(0, size)],
            self.refs.q_sem.at[index & 1],
        )

    def out_copies(
        self, tile: QueryTile, index: Scalar, num_tokens: Scalar, act: Callable[[Any], None]
    ) -> None:
        """`act` on each copy of the first `num_tokens` tokens of a tile: all at once, or 16 and 1.

        To wait, only `index` and `num_tokens` need to be those of the start.
        """
        size, slot = self.kind.query_tokens, index & 1
        offset = tile.first - self.walk.tile_start(tile)

        def copy(first: Scalar | int, count: int) -> Any:
            return pltpu.make_async_copy(
                self.refs.out_buffer.at[slot, pl.ds(offset + first, count)],
                self.refs.out.at[pl.ds(tile.first + first, count)],
                self.refs.out_sem.at[slot],
            )

        @pl.when(num_tokens == size)
        def _() -> None:
            act(copy(0, size))

        if size > 1:
            sixteens = jnp.where(num_tokens == size, 0, div(num_tokens, 16))
            ones = jnp.where(num_tokens == size, 0, rem(num_tokens, 16))
            _loop(jnp.int32(0), sixteens, lambda i: act(copy(i * 16, 16)))
            _loop(jnp.int32(0), ones, lambda i: act(copy(sixteens * 16 + i, 1)))

    # The computation.

    @property
    def num_rows(self) -> int:
        """Rows of the matrices of all heads: the queries of one head after the other."""
        return self.statics.num_heads * self.kind.query_tokens

    @property
    def part_heads(self) -> int:
        """Query heads, all of one kv head, whose rows are computed together.

        Up to 256 rows: enough to keep a matrix unit at work on what it has loaded, few enough for
        the values between the two products to stay near.
        """
        group, size = self.statics.group, self.kind.query_tokens
        if self.kind.is_decode:
            return group
        return max(d for d in range(1, group + 1) if group % d == 0 and (d * size <= 256 or d == 1))

    def begin_tile(self, index: Scalar) -> None:
        """Empty sums; the queries, whose copy was started, as rows of matrices."""
        refs, size = self.refs, self.kind.query_tokens
        rows = pl.ds(0, self.num_rows)
        refs.maximum[rows] = jnp.full((self.num_rows, LANES), MASKED, jnp.float32)
        for sums in (refs.denominator, refs.numerator):
            sums[rows] = jnp.zeros((self.num_rows, sums.shape[1]), jnp.float32)
        num_words, dtype = self.statics.num_words, self.statics.dtype
        if self.kind.is_decode:
            heads = jnp.concatenate(unpack(refs.q_buffer[index & 1, 0]))
            refs.q_rows[pl.ds(0, heads.shape[0])] = heads.astype(dtype)
            return

        def word(w: Scalar) -> None:
            words = refs.q_buffer[index & 1, pl.ds(0, size), pl.ds(w, 1), :].reshape(size, -1)
            for i, queries in enumerate(unpack(words)):
                refs.q_rows[self.rows_of(w + i * num_words, 1)] = queries.astype(dtype)

        _loop(jnp.int32(0), jnp.int32(num_words), word)

    def rows_of(self, n: Scalar | int, num_heads: int) -> Any:
        """Rows of the query heads n : n + num_heads."""
        size = self.kind.query_tokens
        first = n * size if isinstance(n, int) else pl.multiple_of(n * size, size)
        return pl.ds(first, num_heads * size)

    def lay_scales(self, slot: Scalar) -> None:
        """Bring the scales of a tile from a row per run of slots to a row per kv head.

        Rows of 8 runs x 8 heads of 16 lanes are transposed in one vector register, one diagonal
        after the other: rotations and choices, so that no value is touched.
        """
        refs, pieces = self.refs, LANES // SCALE_RUN
        row = lax.broadcasted_iota(jnp.int32, (pieces, LANES), 0)
        piece = lax.broadcasted_iota(jnp.int32, (pieces, LANES), 1) >> (SCALE_RUN.bit_length() - 1)
        for heads in range(0, refs.scales_buffer.shape[-1], LANES):
            for first in range(0, self.statics.context_tokens // SCALE_RUN, pieces):
                runs = refs.scales_buffer[slot, first : first + pieces, 0, heads : heads + LANES]
                laid = runs  # diagonal 0: head i of run i
                for d in range(1, pieces):  # head i of run i - d
                    turned = pltpu.roll(runs, (pieces - d) * SCALE_RUN, 1)
                    turned = pltpu.roll(turned, d, 0)
                    laid = jnp.where((row - piece) & (pieces - 1) == d, turned, laid)
                rows = pl.ds(heads // SCALE_RUN, pieces)
                refs.scales_rows[rows, pl.ds(first * SCALE_RUN, LANES)] = laid

    def attend(self, cursor: Cursor, step: Scalar) -> None:
        """Add one context tile to the sums of all heads of a query tile."""
        statics = self.statics
        tile, slot = self.walk.query_tile(cursor), rem(step, statics.num_buffers)
        first = cursor.c_tile * statics.context_tokens  # position of the context tile
        if statics.is_quantised:
            self.lay_scales(slot)
        is_inner = first + statics.context_tokens - 1 <= tile.first_position
        if statics.sliding_window is not None:
            is_inner &= tile.last_position - first < statics.sliding_window

        num_parts = statics.num_heads // self.part_heads

        def parts(is_edge: bool) -> None:
            def part(i: Scalar | int) -> None:
                self.attend_part(i, tile, first, slot, is_edge=is_edge)

            # Unrolled, the latencies of one head hide behind the others. A tile of many queries
            # keeps the units busy by itself.
            if self.kind.is_decode:
                for i in range(num_parts):
                    part(i)
            else:
                _loop(jnp.int32(0), jnp.int32(num_parts), part)

        pl.when(is_inner)(lambda: parts(False))
        pl.when(~is_inner)(lambda: parts(True))

    def attend_part(
        self, i: Scalar | int, tile: QueryTile, first: Scalar, slot: Scalar, *, is_edge: bool
    ) -> None:
        """Online softmax of `part_heads` heads over a context tile that starts at `first`."""
        statics, refs, num_heads = self.statics, self.refs, self.part_heads
        parts_of_kv_head = statics.group // num_heads
        k = i // parts_of_kv_head if isinstance(i, int) else div(i, parts_of_kv_head)
        rows = self.rows_of(i * num_heads, num_heads)
        keys, values = self.keys_and_values(k, slot)
        # Scaled as float32: a scale that is no power of two would be rounded into the queries, and
        # its error grow with the scores.
        scores = _dot(refs.q_rows[rows], keys, 1) * statics.scale
        if statics.is_quantised:
            scores *= refs.scales_rows[pl.ds(k, 1), :]
        if is_edge:
            scores = jnp.where(self.visible(tile, first), scores, MASKED)
        before = refs.maximum[rows, :1]
        maximum = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        decay = jnp.exp(before - maximum)
        probs = jnp.exp(scores - maximum)
        denominator = refs.denominator[rows, :1] * decay + jnp.sum(probs, 1, keepdims=True)
        if statics.is_quantised:
            probs *= self.value_scales(k, tile, first, is_edge=is_edge)
        if is_edge:
            position = first + lax.broadcasted_iota(jnp.int32, values.shape, 0)
            is_seen = (position >= self.walk.first_seen(tile)) & (position <= tile.last_position)
            values = jnp.where(is_seen, values, jnp.zeros_like(values))
        added = _dot(probs.astype(statics.dtype), values, 0)
        refs.numerator[rows] = refs.numerator[rows] * decay + added
        refs.maximum[rows] = jnp.broadcast_to(maximum, (maximum.shape[0], LANES))
        refs.denominator[rows] = jnp.broadcast_to(denominator, (denominator.shape[0], LANES))

    def keys_and_values(self, k: Scalar | int, slot: Scalar) -> tuple[jax.Array, jax.Array]:
        """[C, lanes] each; below 128 lanes of both they are the same array, K beside V.

        There the queries hold zeros beside V, and of the answer only the lanes of V are read.
        """
        both = self.refs.kv_buffer[slot, k].astype(self.statics.dtype)
        head_dim = self.statics.head_dim
        if 2 * head_dim <= LANES:
            return both, both
        return both[:, :head_dim], both[:, head_dim:]

    def visible(self, tile: QueryTile, first: Scalar) -> jax.Array:
        """[part_heads * query_tokens, C]: which query sees which token."""
        statics, size = self.statics, self.kind.query_tokens
        shape = (self.part_heads * size, statics.context_tokens)
        start = tile.first_position - (tile.first - self.walk.tile_start(tile))
        query = start + (lax.broadcasted_iota(jnp.int32, shape, 0) & (size - 1))
        distance = query - (first + lax.broadcasted_iota(jnp.int32, shape, 1))
        is_visible = distance >= 0
        if statics.sliding_window is not None:
            is_visible &= distance < statics.sliding_window
        return is_visible

    def value_scales(
        self, k: Scalar | int, tile: QueryTile, first: Scalar, *, is_edge: bool
    ) -> jax.Array:
        """[1, C] factors of V; 0 for what no query sees, whose own may be NaN."""
        scales: jax.Array = self.refs.scales_rows[pl.ds(self.statics.num_kv_heads + k, 1), :]
        if not is_edge:
            return scales
        position = first + lax.broadcasted_iota(jnp.int32, scales.shape, 1)
        is_seen = (position >= self.walk.first_seen(tile)) & (position <= tile.last_position)
        return jnp.where(is_seen, scales, 0.0)

    def end_tile(self, cursor: Cursor, pending: Pending, is_whole: Scalar) -> Pending:
        """Normalise and send a finished query tile; of a cut one, send the sums."""
        tile, index = self.walk.query_tile(cursor), pending.num_done
        self.wait_out(index, pending.before_last)
        num_tokens = tile.num_tokens
        if self.kind.is_decode:
            num_tokens = self.end_decode(index, is_whole)
        else:
            self.end_queries(index)
        self.out_copies(tile, index, num_tokens, lambda copy: copy.start())
        return Pending(index + 1, pending.last, num_tokens)

    def end_queries(self, index: Scalar) -> None:
        """Bring a tile's answers from a head's rows to tokens."""
        refs, size = self.refs, self.kind.query_tokens

        num_words, packing = self.statics.num_words, self.statics.packing

        def word(w: Scalar) -> None:
            answers = []
            for i in range(packing):
                rows = self.rows_of(w + i * num_words, 1)
                answers.append(refs.numerator[rows] / refs.denominator[rows, :1])
            words = pack(answers).reshape(size, 1, -1)
            refs.out_buffer[index & 1, pl.ds(0, size), pl.ds(w, 1), :] = words

        _loop(jnp.int32(0), jnp.int32(num_words), word)

    def end_decode(self, index: Scalar, is_whole: Scalar) -> Scalar:
        """The answer of a decode, or the sums of one that the other core has a part of too.

        Returns:
            How many tokens are to be sent to `out`: 1 or 0.
        """
        refs, num_words, packing = self.refs, self.statics.num_words, self.statics.packing
        heads = pl.ds(0, num_words * packing)
        answers = refs.numerator[heads] / refs.denominator[heads, :1]
        refs.out_buffer[index & 1, 0] = pack(
            [answers[i * num_words : (i + 1) * num_words] for i in range(packing)]
        )
        if self.statics.num_cores == 1:
            return jnp.int32(1)

        @pl.when(~is_whole)
        def _() -> None:
            core, sem = pl.program_id(0), refs.out_sem.at[index & 1]
            rows = pl.ds(0, self.num_rows)
            copies = [(refs.numerator.at[rows], refs.part_out.at[core])]
            for i, sums in enumerate((refs.maximum, refs.denominator)):
                copies.append((sums.at[rows], refs.part_stats.at[core, i]))
            for source, target in copies:  # at most once for each core: no need to overlap
                copy = pltpu.make_async_copy(source, target, sem)
                copy.start()
                copy.wait()

        return is_whole.astype(jnp.int32)

    def wait_out(self, index: Scalar, num_tokens: Scalar) -> None:
        """Wait for what query tile `index` sends; nothing if `num_tokens` is 0."""
        anywhere = QueryTile(jnp.int32(0), num_tokens, jnp.int32(0))
        self.out_copies(anywhere, index, num_tokens, lambda copy: copy.wait())

    # All together.

    def run(self) -> None:
        """Walk this core's steps."""
        num_ahead = self.statics.num_buffers - 1
        first = self.walk.first()
        first_seen = self.walk.first_seen(self.walk.query_tile(first))
        begins_whole = first.c_tile == div(first_seen, self.statics.context_tokens)
        zero = jnp.int32(0)

        @pl.when(self.walk.is_valid(first))
        def _() -> None:
            self.table_copy(first, zero).start()
            self.q_copy(self.walk.query_tile(first), zero).start()

        def fetch(step: Scalar, cursor: Cursor) -> Cursor:
            """Start the blocks of a step and the table of the one after it."""

            def go() -> Cursor:
                following = self.walk.next(cursor)

                @pl.when(self.walk.is_valid(following))
                def _() -> None:
                    self.table_copy(following, step + 1).start()

                self.start_blocks(cursor, step)
                return following

            return Cursor(*lax.cond(self.walk.is_valid(cursor), go, lambda: cursor))

        ahead = first
        for i in range(num_ahead):
            ahead = fetch(jnp.int32(i), ahead)

        def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
            step, cursor, ahead, is_new, is_whole, pending = state
            ahead = fetch(step + num_ahead, ahead)
            index = pending.num_done

            @pl.when(is_new)
            def _() -> None:
                self.q_copy(self.walk.query_tile(cursor), index).wait()
                following = self.walk.next_tile(cursor)

                @pl.when(self.walk.is_valid(following))
                def _() -> None:
                    self.q_copy(self.walk.query_tile(following), index + 1).start()

                self.begin_tile(index)

            self.wait_blocks(cursor, step)
            self.attend(cursor, step)
            is_end = self.walk.is_last_of_tile(cursor)
            is_whole = is_whole & (is_end | (cursor.left > 1))
            is_last = is_end | (cursor.left == 1)
            pending = Pending(
                *lax.cond(
                    is_last, lambda: self.end_tile(cursor, pending, is_whole), lambda: pending
                )
            )
            return step + 1, self.walk.next(cursor), ahead, is_last, is_whole | is_last, pending

        none = Pending(zero, zero, zero)
        state = (zero, first, ahead, jnp.bool_(True), begins_whole, none)
        pending = lax.while_loop(lambda state: self.walk.is_valid(state[1]), body, state)[-1]
        self.wait_out(pending.num_done, pending.before_last)
        self.wait_out(pending.num_done + 1, pending.last)


def attention_kernel(statics: Statics, make_refs: Callable[..., Refs], *refs: Any) -> None:
    """The body that Pallas traces: one pass after the other."""
    for kind in kinds(statics):
        Pass(statics, kind, make_refs(*refs)).run()


def pack(heads: list[jax.Array]) -> jax.Array:
    """One array of float32 as it is; two, in 32-bit words, the first rounded to the lower half.

    A word of two heads moves at any token and any pair of heads, where 16-bit numbers could be
    moved by whole tiles only.
    """
    if len(heads) == 1:
        return heads[0]
    low, high = (
        lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32)
        for x in heads
    )
    return (low >> 16) | high


def unpack(words: jax.Array) -> list[jax.Array]:
    """The float32 numbers that `pack` was given, rounded."""
    if words.dtype == jnp.float32:
        return [words]
    halves = (words << 16, words & jnp.uint32(0xFFFF0000))
    return [lax.bitcast_convert_type(half, jnp.float32) for half in halves]


def _dot(a: jax.Array, b: jax.Array, b_axis: int) -> jax.Array:
    """Contract the lanes of `a` with axis `b_axis` of `b`, in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (((1,), (b_axis,)), ((), ())), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _loop(first: Scalar, end: Scalar, act: Callable[[Scalar], None]) -> None:
    def body(i: Scalar, nothing: Scalar) -> Scalar:
        act(i)
        return nothing

    lax.fori_loop(first, end, body, jnp.int32(0))


def _for_each(first: Scalar, end: Scalar, most: int, act: Callable[[Scalar], None]) -> None:
    """`act` on first..end of at most `most`; the full range without a jump at each."""
    is_full = end - first == most
    unrolled = min(UNROLLED, most)

    @pl.when(is_full)
    def _() -> None:
        def several(i: Scalar) -> None:
            for j in range(unrolled):
                act(i * unrolled + j)

        _loop(jnp.int32(0), jnp.int32(most // unrolled), several)

    pl.when(~is_full)(lambda: _loop(first, end, act))
