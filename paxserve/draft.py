"""What one step has been given so far: the state that `planning.py` and its two hands share.

Owns: the grants of the step, and what must be undone if one of them is taken back. Out: a
`StepPlan`. Must not know: why anything was granted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from paxserve.batch import Batch
from paxserve.draft_rows import DraftRows
from paxserve.events import EventLog, Kind
from paxserve.request import Request, Sequence
from paxserve.step import BlockCopy, RowEntry, RowPlan, StepPlan, TableWrite


@dataclass(slots=True, kw_only=True)
class StepDraft:
    """Invariant: tokens of `rows` + `budget_left` == max_num_batched_tokens.

    rows: what is computed. chunks: the rows of more than one token, by sequence id. unwritten:
    sequence ids of rows that only read again. touched: sequences whose table may have changed.
    newcomers: requests that entered in this step, and the blocks that are swapped in for them.
    started: sequences that took over their source's blocks in this step. published: blocks that a
    request offered to the prefix cache in this step; hits: newcomers that found such a block.
    dropped: requests that were preempted, held back or ended in this step; they are not granted
    anything any more.
    """

    budget_left: int
    rows: DraftRows = field(default_factory=DraftRows)
    chunks: dict[int, RowPlan] = field(default_factory=dict)
    unwritten: set[int] = field(default_factory=set)
    touched: dict[int, Sequence] = field(default_factory=dict)
    newcomers: dict[Request, list[BlockCopy]] = field(default_factory=dict)
    started: dict[Sequence, Sequence] = field(default_factory=dict)
    swap_out: list[BlockCopy] = field(default_factory=list)
    published: dict[Request, list[int]] = field(default_factory=dict)
    hits: dict[int, list[Request]] = field(default_factory=dict)
    dropped: set[Request] = field(default_factory=set)
    num_preempted: int = 0
    num_failed: int = 0

    def publish(self, batch: Batch, request: Request, sequence: Sequence) -> None:
        """Offer full blocks to the prefix cache; see `Batch.publish`."""
        published = batch.publish(request, sequence)
        if published:
            self.published.setdefault(request, []).extend(published)

    def to_plan(self, step_id: int, batch: Batch, events: EventLog) -> StepPlan | None:
        """The finished plan, or None if there is nothing to do. Nothing can be taken back now."""
        swap_in = [copy for copies in self.newcomers.values() for copy in copies]
        copies = self._settled_copies(batch, events)
        if not self.rows and not self.swap_out:
            return None
        self._settle_newcomers(batch, events)
        self._log_chunks(batch, events)
        places = self.rows.index() if self.unwritten else {}
        return StepPlan(
            step_id=step_id,
            rows=self.rows.joined(),
            entries=tuple(self._entries()),
            table_writes=tuple(self._table_writes()),
            copies=tuple(copies),
            swap_in=tuple(swap_in),
            swap_out=tuple(self.swap_out),
            unwritten=tuple(sorted([places[sequence_id] for sequence_id in self.unwritten])),
        )

    def _settled_copies(self, batch: Batch, events: EventLog) -> list[BlockCopy]:
        pending = batch.tables.settle()
        for copy in pending:
            request, _ = batch.by_sequence[copy.sequence.sequence_id]
            events.add(
                Kind.COPIED,
                request.request_id,
                num_tokens=batch.limits.block_size,
                row=copy.sequence.row,
            )
        return [BlockCopy(copy.source, copy.target) for copy in pending]

    def _settle_newcomers(self, batch: Batch, events: EventLog) -> None:
        for request in self.newcomers:
            if not request.is_swapped:  # else nothing is looked for in the cache
                batch.num_entered_tokens += request.trunk.num_entry_tokens
            batch.give_back_host_blocks(request)
            request.num_hit_tokens += request.num_cached_tokens
            batch.num_hit_tokens += request.num_cached_tokens
            request.num_recomputed_tokens += max(
                0, request.num_lost_tokens - request.num_cached_tokens
            )
            request.num_lost_tokens = 0
            if request.first_scheduled_s is None:
                request.first_scheduled_s = events.now_s
            cached = request.num_cached_tokens
            for sequence in request.live:
                events.add(
                    Kind.ENTERED,
                    request.request_id,
                    num_tokens=sequence.num_entry_tokens,
                    row=sequence.row,
                    detail=f"{cached} cached" if cached and sequence is request.live[0] else "",
                )

    def _log_chunks(self, batch: Batch, events: EventLog) -> None:
        for sequence_id, row in self.chunks.items():
            request, _ = batch.by_sequence[sequence_id]
            events.add(Kind.CHUNK, request.request_id, num_tokens=row.num_tokens, row=row.row)

    def _entries(self) -> Iterator[RowEntry]:
        for request in self.newcomers:
            for sequence in request.live:
                sampling = request.sampling._replace(seed=sequence.seed)
                yield RowEntry(
                    sequence.sequence_id, sequence.row, request.num_prompt_tokens, sampling
                )

    def _table_writes(self) -> Iterator[TableWrite]:
        for sequence in self.touched.values():
            start, table = sequence.num_sent_blocks, sequence.block_table
            if len(table) > start:
                sequence.num_sent_blocks = len(table)
                yield TableWrite(sequence.row, start, tuple(table[start:]))
