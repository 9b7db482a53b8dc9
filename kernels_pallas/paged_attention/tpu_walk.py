"""In which order a core takes the work of a step: rows, tiles of their queries, tiles of context.

Owns: the three kinds of rows, the cursor over steps, and what a query tile sees. In: lengths in
SMEM. Out: scalars. Must not know: copies, arithmetic.

Decodes are shared out by steps: the steps of all of them in a line, cut into equal parts, so that
one long row is split (flash-decoding) as well as many short ones are. Tiles of several queries are
dealt to the cores in turn, since later tiles of a prompt cost more.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

NO_LIMIT = 2**31 - 1
SHORT = 16  # queries of a tile of the middle kind

type Scalar = jax.Array


def div(a: Scalar, b: int) -> Scalar:
    """a // b of what is not negative, without the branches on signs that `//` becomes."""
    return lax.div(a, jnp.int32(b))


def rem(a: Scalar, b: int) -> Scalar:
    """a % b of what is not negative."""
    return lax.rem(a, jnp.int32(b))


@dataclass(frozen=True, slots=True, kw_only=True)
class Statics:
    """Everything about a call that is known when it is traced.

    Args:
        num_tokens: T, or 16 if that is more. max_q_len: T. max_rows: R.
        num_kv_heads, group: K and G.
        head_dim, block_size: H and S.
        value_lanes: lanes of an accumulator: H, or 2H where K and V share a tile of lanes.
        scale: factor on the scores.
        sliding_window: tokens a query sees, or None.
        query_tokens, context_tokens, num_buffers, num_cores: see `Tiles` of `pallas_tpu.py`.
        is_quantised: K and V are multiplied by scales.
        dtype: what matrix products take.
    """

    num_tokens: int
    max_q_len: int
    max_rows: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    value_lanes: int
    scale: float
    sliding_window: int | None
    query_tokens: int
    context_tokens: int
    num_buffers: int
    num_cores: int
    is_quantised: bool
    dtype: jnp.dtype

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def packing(self) -> int:
        """Heads in one 32-bit word of queries and output."""
        return 4 // self.dtype.itemsize

    @property
    def num_words(self) -> int:
        """Words of a token: N / packing, rounded up. Word w has the heads w + i * num_words."""
        return -(-self.num_heads // self.packing)

    @property
    def tile_blocks(self) -> int:
        """Blocks of a context tile."""
        return self.context_tokens // self.block_size


class Kind(NamedTuple):
    """Rows of min_q_len..max_q_len tokens, taken in tiles of `query_tokens`."""

    query_tokens: int
    min_q_len: int
    max_q_len: int

    @property
    def is_decode(self) -> bool:
        return self.max_q_len == 1


def kinds(statics: Statics) -> list[Kind]:
    """The kinds of rows a step of this many tokens can hold."""
    tile = statics.query_tokens
    found = [Kind(1, 1, 1)]
    if statics.max_q_len > 1:
        found.append(Kind(min(SHORT, tile), 2, SHORT if tile > SHORT else NO_LIMIT))
    if min(tile, statics.max_q_len) > SHORT:
        found.append(Kind(tile, SHORT + 1, NO_LIMIT))
    return found


class Cursor(NamedTuple):
    """A step: row, query tile in it, context tile, and how many steps are left with it."""

    row: Scalar
    q_tile: Scalar
    c_tile: Scalar
    left: Scalar


class QueryTile(NamedTuple):
    """Tokens first : first + num_tokens of the step, at the positions first_position on."""

    first: Scalar
    num_tokens: Scalar
    first_position: Scalar

    @property
    def last_position(self) -> Scalar:
        return self.first_position + self.num_tokens - 1


@dataclass(frozen=True, slots=True)
class Walk:
    """One kind of rows, walked by one core.

    Args:
        context_lens, cu_q_lens: [R] and [R + 1] in SMEM, the latter flat from num_rows on.
        shares: [num_cores * 3] in SMEM: first row, first context tile, steps of the decodes.
    """

    statics: Statics
    kind: Kind
    context_lens: Any
    cu_q_lens: Any
    shares: Any

    def num_q_tiles(self, row: Scalar) -> Scalar:
        """Query tiles of a row; 0 if it is of another kind."""
        row = jnp.minimum(row, self.statics.max_rows - 1)
        q_len = self.cu_q_lens[row + 1] - self.cu_q_lens[row]
        is_ours = (q_len >= self.kind.min_q_len) & (q_len <= self.kind.max_q_len)
        return jnp.where(
            is_ours, div(q_len + (self.kind.query_tokens - 1), self.kind.query_tokens), 0
        )

    def query_tile(self, cursor: Cursor) -> QueryTile:
        row = jnp.minimum(cursor.row, self.statics.max_rows - 1)
        end = self.cu_q_lens[row + 1]
        first = self.cu_q_lens[row] + cursor.q_tile * self.kind.query_tokens
        num_tokens = jnp.minimum(end - first, self.kind.query_tokens)
        return QueryTile(first, num_tokens, self.context_lens[row] - end + first)

    def first_seen(self, tile: QueryTile) -> Scalar:
        """First position that a query of the tile sees."""
        if self.statics.sliding_window is None:
            return jnp.zeros_like(tile.first_position)
        return jnp.maximum(tile.first_position - (self.statics.sliding_window - 1), 0)

    def is_valid(self, cursor: Cursor) -> Scalar:
        return (cursor.row < self.statics.max_rows) & (cursor.left > 0)

    def is_last_of_tile(self, cursor: Cursor) -> Scalar:
        """The query tile ends with this step."""
        last = div(self.query_tile(cursor).last_position, self.statics.context_tokens)
        return cursor.c_tile >= last

    def at_row(self, row: Scalar, q_tile: Scalar, left: Scalar) -> Cursor:
        """First step of query tile `q_tile`, counted from `row` on through rows of our kind."""

        def is_beyond(at: tuple[Scalar, Scalar]) -> Scalar:
            return (at[0] < self.statics.max_rows) & (at[1] >= self.num_q_tiles(at[0]))

        def next_row(at: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            return at[0] + 1, at[1] - self.num_q_tiles(at[0])

        row, q_tile = lax.while_loop(is_beyond, next_row, (row, q_tile))
        found = Cursor(row, q_tile, jnp.zeros_like(row), left)
        first = div(self.first_seen(self.query_tile(found)), self.statics.context_tokens)
        return found._replace(c_tile=first)

    def first(self) -> Cursor:
        """Where this core starts: decodes are shared by steps, query tiles are dealt in turn."""
        core = pl.program_id(0)
        if not self.kind.is_decode:
            return self.at_row(jnp.int32(0), core, jnp.int32(NO_LIMIT))
        row, c_tile, left = (self.shares[core * 3 + i] for i in range(3))
        return Cursor(row, jnp.int32(0), c_tile, left)

    def next_tile(self, cursor: Cursor) -> Cursor:
        """First step of the query tile that this core takes after the cursor's."""
        stride = 1 if self.kind.is_decode else self.statics.num_cores
        left = cursor.left - 1
        if self.kind.is_decode:
            last = div(self.query_tile(cursor).last_position, self.statics.context_tokens)
            left = cursor.left - (last - cursor.c_tile + 1)
        return self.at_row(cursor.row, cursor.q_tile + stride, left)

    def next(self, cursor: Cursor) -> Cursor:
        def same_tile() -> Cursor:
            return cursor._replace(c_tile=cursor.c_tile + 1, left=cursor.left - 1)

        return Cursor(
            *lax.cond(self.is_last_of_tile(cursor), lambda: self.next_tile(cursor), same_tile)
        )

    def seen_blocks(self, cursor: Cursor) -> tuple[Scalar, Scalar]:
        """Blocks of the context tile that some query sees: first and end, counted in the tile."""
        tile, size = self.query_tile(cursor), self.statics.block_size
        before = cursor.c_tile * self.statics.tile_blocks
        first = jnp.maximum(div(self.first_seen(tile), size) - before, 0)
        end = jnp.minimum(div(tile.last_position, size) + 1 - before, self.statics.tile_blocks)
        return first, end

    def tile_start(self, tile: QueryTile) -> Scalar:
        """First token of the tile's arrays: moved back where they would end past the last one."""
        return jnp.minimum(tile.first, self.statics.num_tokens - self.kind.query_tokens)
