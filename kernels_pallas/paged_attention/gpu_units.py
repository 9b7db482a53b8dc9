"""How the Hopper kernel cuts a step into units of work, and who does which: plain XLA operations.

Owns: `Geometry` (what one tile of the kernel holds), and the integers that tell each program of the
persistent grid what to do. In: lengths. Out: `Plan`. Must not know: pools, how a tile is computed.

A unit is a few queries of one row for a few kv heads; its context is walked in tiles. All tiles of
all units are numbered through, and each program takes an equal run of them:

      unit       0           1     2                       3
      tiles      |--------|--|-----|--------------------|--|------|
      programs   [    0    ][    1     ][    2    ][    3    ][  4

so one long row is shared by many programs and the chip stays full whatever the lengths are. A unit
that lies in one program is written by it; one that is cut leaves a part per program, and those are
combined afterwards.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Columns of Plan.entries.
(ROW, TOKEN, LOW, HIGH, POSITION, CONTEXT, FIRST_RUN, NUM_TILES, START, NEXT) = range(10)
ROWS = 64  # of one wgmma: the least a warpgroup multiplies


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of a tile, all static.

    Args:
        block_size: S.
        group: G, query heads per kv head.
        num_kv_heads: K.
        head_dim: H.
        consumers: warpgroups that compute. Each has its own 64 query rows.
        heads: kv heads of a unit, whose keys lie side by side in a tile.
        queries: queries of one consumer, each with heads * group rows.
        run: tokens that one copy brings, a block or a part of one.
        runs: copies per tile.
        stages: tiles of K and V in flight.
        prefetches_queries: the next unit's queries have memory of their own.
        programs: of the persistent grid.
    """

    block_size: int
    group: int
    num_kv_heads: int
    head_dim: int
    consumers: int
    heads: int
    queries: int
    run: int
    runs: int
    stages: int
    prefetches_queries: bool
    programs: int

    @property
    def rows_per_query(self) -> int:
        return self.heads * self.group

    @property
    def unit_queries(self) -> int:
        return self.queries * self.consumers

    @property
    def head_steps(self) -> int:
        """Units that cover all kv heads of an entry."""
        return self.num_kv_heads // self.heads

    @property
    def run_rows(self) -> int:
        return self.heads * self.run

    @property
    def columns(self) -> int:
        """Scores of one query row in one tile: tokens times heads."""
        return self.runs * self.run_rows

    @property
    def tile_tokens(self) -> int:
        return self.runs * self.run


class Plan(NamedTuple):
    """The integers of one pass.

    An entry is a unit before it is split by heads.
    """

    entries: jax.Array  # [entries, fields] int32, fields as above
    first: jax.Array  # [programs] int32: the entry in which a program's run of tiles starts
    sizes: jax.Array  # [2] int32: tiles per program, and of all


class Queries(NamedTuple):
    """Entries before they are measured, arrays [entries] int32; 0 queries is none."""

    row: jax.Array
    token: jax.Array  # the first of its own queries, among the step's tokens
    num_queries: jax.Array
    position: jax.Array  # of that query in the row's context
    context: jax.Array  # 0: padding, whose output is zero


def plan(queries: Queries, geometry: Geometry, num_tokens: int, sliding_window: int | None) -> Plan:
    """Measures the entries and deals their tiles out.

    Args:
        num_tokens: T, at least `geometry.unit_queries`: an entry at the end of the array is moved
            back to fit and skips the first of its queries.
    """
    lowest = jnp.zeros_like(queries.position)
    if sliding_window is not None:
        lowest = jnp.maximum(queries.position - sliding_window + 1, 0)
    first_run = lowest // geometry.run
    seen = jnp.minimum(queries.position + queries.num_queries, queries.context)
    tiles = _ceil_div(seen - first_run * geometry.run, geometry.tile_tokens)
    tiles = jnp.where(queries.num_queries > 0, jnp.maximum(tiles, 1), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32) * geometry.head_steps
    last_entry = ends.shape[0] - 1

    def entry_at(tile: jax.Array) -> jax.Array:
        found = jnp.searchsorted(ends, tile, side="right", method="compare_all")
        return jnp.minimum(found, last_entry).astype(jnp.int32)

    token = jnp.minimum(queries.token, num_tokens - geometry.unit_queries)
    low = queries.token - token
    fields = {
        ROW: queries.row,
        TOKEN: token,
        LOW: low,
        HIGH: low + queries.num_queries,
        POSITION: queries.position - low,
        CONTEXT: queries.context,
        FIRST_RUN: first_run,
        NUM_TILES: tiles,
        START: ends - tiles * geometry.head_steps,
        NEXT: entry_at(ends),
    }
    share = jnp.maximum(_ceil_div(ends[-1], geometry.programs), 1)
    return Plan(
        jnp.stack([fields[field] for field in sorted(fields)], axis=1),
        entry_at(jnp.arange(geometry.programs, dtype=jnp.int32) * share),
        jnp.stack([share, ends[-1]]),
    )


def single_queries(
    context_lens: jax.Array, cu_q_lens: jax.Array, q_lens: jax.Array, num_tokens: int
) -> Queries:
    """An entry per row; only rows with one query count.

    q_lens are [R], 0 for padding.
    """
    row = jnp.arange(q_lens.shape[0], dtype=jnp.int32)
    return Queries(
        row=row,
        token=jnp.minimum(cu_q_lens[:-1], num_tokens - 1),
        num_queries=(q_lens == 1).astype(jnp.int32),
        position=context_lens - 1,
        context=context_lens,
    )


def every_query(
    context_lens: jax.Array, cu_q_lens: jax.Array, q_lens: jax.Array, num_tokens: int
) -> Queries:
    """An entry per token, padding included: right for any rows, but a chunk's context is walked
    once for each of its tokens.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row, is_real = _row_of(token, cu_q_lens, q_lens)
    return Queries(
        row=jnp.where(is_real, row, 0),
        token=token,
        num_queries=jnp.ones_like(token),
        position=jnp.where(is_real, context_lens[row] - cu_q_lens[row + 1] + token, 0),
        context=jnp.where(is_real, context_lens[row], 0),
    )


def tiles_of_queries(
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    q_lens: jax.Array,
    num_tokens: int,
    unit_queries: int,
) -> Queries:
    """Entries of up to `unit_queries` queries: rows with several, then the padding as if a row."""
    num_rows = q_lens.shape[0]
    num_real = jnp.max(jnp.where(q_lens > 0, cu_q_lens[1:], 0))
    lens = jnp.concatenate([jnp.where(q_lens > 1, q_lens, 0), (num_tokens - num_real)[None]])
    starts = jnp.concatenate([cu_q_lens[:-1], num_real[None]])
    contexts = jnp.concatenate([context_lens, jnp.zeros(1, jnp.int32)])
    ends = jnp.cumsum(_ceil_div(lens, unit_queries), dtype=jnp.int32)
    # As many as T tokens in num_rows + 1 runs can make.
    entry = jnp.arange(num_tokens // unit_queries + num_rows + 1, dtype=jnp.int32)
    row = jnp.searchsorted(ends, entry, side="right", method="compare_all").astype(jnp.int32)
    is_entry = row <= num_rows
    row = jnp.minimum(row, num_rows)
    offset = (entry - ends[row]) * unit_queries + _ceil_div(lens[row], unit_queries) * unit_queries
    count = jnp.where(is_entry, jnp.minimum(lens[row] - offset, unit_queries), 0)
    is_padding = row == num_rows
    return Queries(
        row=jnp.where(is_padding, 0, row),
        token=jnp.where(is_entry, starts[row] + offset, 0),
        num_queries=count,
        position=jnp.where(is_padding, 0, contexts[row] - lens[row] + offset),
        context=contexts[row],
    )


def _row_of(
    token: jax.Array, cu_q_lens: jax.Array, q_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The row of each token, and whether it has one."""
    last = q_lens.shape[0] - 1
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all")
    row = jnp.minimum(row, last).astype(jnp.int32)
    is_real = (token < cu_q_lens[row + 1]) & (q_lens[row] > 0)
    return row, is_real


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + (b - 1)) // b
