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

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload


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


class DecodeRows(Sequence[RowPlan]):
    """The rows of a step in which every row decodes: one token each, the one last sampled there.

    They are nearly all rows there are, so they are kept as columns, from which packing and applying
    read; a `RowPlan` is made for whoever asks.
    """

    __slots__ = ("_rows", "first_positions", "places", "sequence_ids")

    def __init__(
        self, sequence_ids: Sequence[int], places: Sequence[int], first_positions: Sequence[int]
    ) -> None:
        self.sequence_ids = sequence_ids
        self.places = places
        self.first_positions = first_positions
        self._rows: tuple[RowPlan, ...] | None = None

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @overload
    def __getitem__(self, index: int) -> RowPlan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RowPlan, ...]: ...
    def __getitem__(self, index: int | slice) -> RowPlan | tuple[RowPlan, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[RowPlan]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, DecodeRows) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[RowPlan, ...]:
        if self._rows is None:
            columns = zip(self.sequence_ids, self.places, self.first_positions, strict=True)
            self._rows = tuple([RowPlan(s, place, first, 1, 1, ()) for s, place, first in columns])
        return self._rows


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
    rows: tuple[RowPlan, ...] | DecodeRows
    entries: tuple[RowEntry, ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    unwritten: tuple[int, ...] = ()

    def num_blocks(self, block_size: int) -> int:
        """Blocks that this step reads, through the table of each of its rows."""
        if isinstance(self.rows, DecodeRows):
            return sum([first // block_size for first in self.rows.first_positions]) + len(
                self.rows
            )
        return sum([-(-(row[2] + row[3]) // block_size) for row in self.rows])

    @property
    def sequence_ids(self) -> Sequence[int]:
        """Whose rows they are."""
        if isinstance(self.rows, DecodeRows):
            return self.rows.sequence_ids
        return [row.sequence_id for row in self.rows]

    @property
    def places(self) -> Sequence[int]:
        """Rows of the batch, in the order of `rows`."""
        if isinstance(self.rows, DecodeRows):
            return self.rows.places
        return [row.row for row in self.rows]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, all rows together."""
        if isinstance(self.rows, DecodeRows):
            return len(self.rows)
        return sum([row.num_tokens for row in self.rows])


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


class StepResult(NamedTuple):
    """The answer to a plan: `outputs[i]` belongs to `plan.rows[i]`.

    `duration_s` includes `compile_s`. `padded_tokens` and `padded_rows` are the shape that really
    ran (equal to the plan's own numbers when the executor does not pad). `swap_bytes` are those of
    the swapped blocks, both ways. `terms_s` are what a simulated step's duration is the sum of.
    """

    step_id: int
    outputs: tuple[RowOutput, ...]
    duration_s: float
    compile_s: float = 0.0
    num_compiles: int = 0
    padded_tokens: int = 0
    padded_rows: int = 0
    swap_bytes: int = 0
    terms_s: tuple[float, ...] = ()
