"""What crosses between the scheduler and an executor: `StepPlan` down, `StepResult` up.

Owns: the message types of one step. In and out: only numbers and tuples, so that a plan can be
logged, replayed, or broadcast to other hosts. Must not know: policies, requests, jax.

A row of the plan carries one sequence from its first uncomputed token:

    known tokens   |<---- computed ---->|<-- num_tokens -->|<-- left for a later step -->|
                                        ^ first_position    num_samples = 0: a chunk; the
                                                            last known token is not reached

Prompt, chunk, decode and resume after preemption are all this one picture.
Order inside a step: swap out, swap in, copies, then in each layer writes before reads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paxserve.columns import Columns

_ROW_COLUMNS = (
    "sequence_ids",
    "places",
    "first_positions",
    "num_tokens",
    "num_samples",
    "tokens",
)  # in the order of the fields of `RowPlan`


class RowPlan(NamedTuple):
    """The share of one sequence in a step.

    `tokens` are the input ids at `first_position`, or empty: then the one input is the token that
    was last sampled in this row, which the executor has kept.
    `num_samples` is 0 for a chunk that leaves known tokens, else 1 (k + 1 to verify k drafts).
    """

    sequence_id: int
    row: int
    first_position: int
    num_tokens: int
    num_samples: int
    tokens: tuple[int, ...]


class Rows(Columns[RowPlan]):
    """The rows of a step as columns, which planning, packing, costing and applying read. In most
    steps all rows decode: one token each, the one last sampled there.

    Invariant: all columns are equally long; `are_decodes` only if every row is a decode whose input
    is on the device.
    """

    __slots__ = ("_firsts", "are_decodes", *_ROW_COLUMNS)

    def __init__(
        self,
        sequence_ids: Sequence[int],
        places: Sequence[int],
        first_positions: Sequence[int],
        num_tokens: Sequence[int],
        num_samples: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
        *,
        are_decodes: bool = False,
    ) -> None:
        super().__init__()
        self.sequence_ids = sequence_ids
        self.places = places
        self.first_positions = first_positions
        self.num_tokens = num_tokens
        self.num_samples = num_samples
        self.tokens = tokens
        self.are_decodes = are_decodes
        self._firsts: np.ndarray | None = None

    @classmethod
    def decodes(
        cls, sequence_ids: Sequence[int], places: Sequence[int], first_positions: Sequence[int]
    ) -> "Rows":
        """Rows that all decode."""
        ones = [1] * len(sequence_ids)
        nothing: list[tuple[int, ...]] = [()] * len(sequence_ids)
        return cls(sequence_ids, places, first_positions, ones, ones, nothing, are_decodes=True)

    @classmethod
    def of(cls, rows: Sequence[RowPlan]) -> "Rows":
        """These rows; they may be columns already."""
        if isinstance(rows, Rows):
            return rows
        return cls(*(zip(*rows, strict=True) if rows else ((),) * len(_ROW_COLUMNS)))

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """The rows of all parts, one part after the other."""
        columns: list[list[Any]] = [[] for _ in _ROW_COLUMNS]
        for part in parts:
            for column, name in zip(columns, _ROW_COLUMNS, strict=True):
                column += getattr(part, name)
        return cls(*columns)

    @property
    def firsts(self) -> np.ndarray:
        """`first_positions` [rows], i32."""
        if self._firsts is None:
            self._firsts = np.fromiter(self.first_positions, np.int32, len(self.first_positions))
        return self._firsts

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def _make(self) -> tuple[RowPlan, ...]:
        columns = [getattr(self, name) for name in _ROW_COLUMNS]
        return tuple(map(RowPlan._make, zip(*columns, strict=True)))


class RowSampling(NamedTuple):
    """How the tokens of a row are chosen; see `SamplingParams` for meaning and ranges.

    `suppressed_ids` may not be sampled before output position `min_tokens`; `num_logprobs` is -1
    when no log-probabilities are asked for.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    min_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()


class RowEntry(NamedTuple):
    """A sequence enters a row of the batch, and stays in it until another enters there."""

    sequence_id: int
    row: int
    num_prompt_tokens: int
    sampling: RowSampling


class TableWrite(NamedTuple):
    """Blocks `block_ids` stand in the block table of `row` from column `start` on."""

    row: int
    start: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copy a whole block; for swaps one side is a block of the host pool."""

    source: int
    target: int


class StepPlan(NamedTuple):
    """One step, complete: an executor needs nothing else.

    There are no rows only where nothing but swapping out is left to do.

    Invariants: every row has `num_tokens >= 1`; no two tokens of the step write one slot; a row's
    entry and table writes precede its use.

    `unwritten` are places in `rows` of rows that read their one token again: its KV is in their
    table already (or is written by another row of this step), so they write none. That is how the
    samples of one prompt start together.
    """

    step_id: int
    rows: Sequence[RowPlan]
    entries: tuple[RowEntry, ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    unwritten: tuple[int, ...] = ()

    def num_blocks(self, block_size: int) -> int:
        """Blocks that this step reads, through the table of each of its rows."""
        rows = self.columns
        ends = rows.firsts + (1 if rows.are_decodes else np.array(rows.num_tokens, np.int32))
        return int((-(-ends // block_size)).sum())

    @property
    def columns(self) -> Rows:
        """The rows as columns."""
        return Rows.of(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, all rows together."""
        return sum(self.columns.num_tokens)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one output position: the sampled token's, its rank, and the best ids."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RowOutput(NamedTuple):
    """A row's `num_samples` tokens; -1 says that the logits were not finite."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


NO_OUTPUT = RowOutput(())


class Outputs(Columns[RowOutput]):
    """The outputs of rows that sample at most one token each, as columns. A token is None where
    none was sampled.
    """

    __slots__ = ("logprobs", "tokens")

    def __init__(
        self,
        tokens: Sequence[int | None],
        logprobs: Sequence[tuple[TokenLogprobs, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.logprobs = [()] * len(tokens) if logprobs is None else logprobs

    @classmethod
    def of(cls, outputs: Sequence[RowOutput]) -> "Outputs":
        """These outputs; they may be columns already."""
        if isinstance(outputs, Outputs):
            return outputs
        tokens = [output.tokens[0] if output.tokens else None for output in outputs]
        return cls(tokens, [output.logprobs for output in outputs])

    def __len__(self) -> int:
        return len(self.tokens)

    def _make(self) -> tuple[RowOutput, ...]:
        columns = zip(self.tokens, self.logprobs, strict=True)
        return tuple([RowOutput(() if t is None else (t,), logprobs) for t, logprobs in columns])


class StepResult(NamedTuple):
    """The answer to a plan: `outputs[i]` belongs to `plan.rows[i]`.

    `duration_s` includes `compile_s`. `padded_tokens` and `padded_rows` are the shape that really
    ran (equal to the plan's own numbers when the executor does not pad), `padded_blocks` are the
    entries of its block table, 0 where none is moved. `swap_bytes` are those of the swapped blocks,
    both ways. `terms_s` are what a simulated step's duration is the sum of.
    """

    step_id: int
    outputs: Sequence[RowOutput]
    duration_s: float
    compile_s: float = 0.0
    num_compiles: int = 0
    padded_tokens: int = 0
    padded_rows: int = 0
    padded_blocks: int = 0
    swap_bytes: int = 0
    terms_s: tuple[float, ...] = ()
