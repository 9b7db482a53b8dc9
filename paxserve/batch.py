"""Who waits, who runs, who is finished but not released; and the rows and blocks they hold.

Owns: membership, rows, and (through `kv/`) blocks. In: decisions of `planning.py` and results from
`scheduler.py`. Out: the current membership, and events. Must not know: budgets, batching policies.
"""

from collections.abc import Sequence as SequenceOf
from heapq import heappop, heappush
from typing import Any

from paxserve.admission import Admission, Seen
from paxserve.events import EventLog, Kind
from paxserve.gate import Gate
from paxserve.gates import Gates
from paxserve.kv.block_pool import BlockPool
from paxserve.kv.block_table import BlockTables
from paxserve.limits import Limits
from paxserve.placement import Placement
from paxserve.request import FinishReason, Request, Sequence, State
from paxserve.reservation import Reservation
from paxserve.waiting import WaitingQueue


class Batch:
    """Every live request is in exactly one of `waiting`, `running`, `finished`. `ended` collects
    those that finished until somebody takes them.

    Invariants: the rows of running and finished sequences and the free rows are all rows, once
    each; the blocks of their tables and the free blocks are all usable blocks, once each; a waiting
    request holds neither.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        admission: Admission,
        reservation: Reservation,
        placement: Placement,
        events: EventLog,
        gates: SequenceOf[Gate] = (),
    ) -> None:
        self.limits = limits
        self._placement = placement
        self.pool = BlockPool(num_blocks=limits.num_blocks, placement=placement)
        self.tables = BlockTables(pool=self.pool, reservation=reservation, limits=limits)
        self.waiting = WaitingQueue(admission)
        self.gates = Gates(gates)
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.ended: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.by_sequence: dict[int, tuple[Request, Sequence]] = {}
        self.free_rows = list(range(limits.max_num_seqs))
        self._num_admitted = 0
        self._events = events

    def add(self, request: Request) -> None:
        """A new request waits."""
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        self.by_sequence |= {s.sequence_id: (request, s) for s in request.sequences}
        self._events.add(Kind.ARRIVED, request.request_id, num_tokens=request.num_prompt_tokens)
        self.tell(Kind.ARRIVED, request)
        self.waiting.push(request)

    def tell(self, kind: Kind, request: Request | None, **numbers: Any) -> None:
        """Policies that learn see that something happened now."""
        seen = Seen(kind, self._events.now_s, request, **numbers)
        self.waiting.tell(seen)
        self.gates.tell(seen)

    def enter(self, request: Request) -> None:
        """A waiting request, whose tables hold its memory already, takes the lowest free rows."""
        self.waiting.remove(request)
        self.running.append(request)
        request.state = State.RUNNING
        request.admitted_seq = self._num_admitted
        self._num_admitted += 1
        for sequence in request.sequences:
            sequence.row = heappop(self.free_rows)
            sequence.num_entry_tokens = sequence.num_known_tokens
        self.tell(Kind.ENTERED, request)

    def withdraw(self, request: Request) -> None:
        """A running request waits again, and holds nothing."""
        self.running.remove(request)
        self._let_go(request)
        request.state = State.WAITING
        for sequence in request.sequences:
            sequence.num_computed_tokens = 0
        self.tell(Kind.PREEMPTED, request)
        self.waiting.push(request)

    def preempt(self, request: Request, *, num_lost_tokens: int, method: str) -> None:
        """A running request gives up row and memory, keeps its tokens, and waits again."""
        self._events.add(
            Kind.PREEMPTED,
            request.request_id,
            num_tokens=num_lost_tokens,
            row=request.sequence.row,
            detail=method,
        )
        request.num_preemptions += 1
        request.num_recomputed_tokens += num_lost_tokens
        self.withdraw(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """A request has ended; one that ran keeps row and memory until `release`."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self.finished.append(request)
        else:
            self.waiting.remove(request)
            self._forget(request)
        self._end(request, reason, stop_reason=stop_reason, error=error)

    def fail_all(self, error: str) -> None:
        """A change broke off in the middle: every live request ends, and what they held is made
        anew, since it can no longer be told who holds what.
        """
        for request in self.requests.values():
            if request.state is not State.FINISHED:
                self._end(request, FinishReason.ERROR, error=error)
            if request.sequence.row >= 0:
                self._log_released(request)
            for sequence in request.sequences:
                sequence.block_table.clear()
                sequence.num_reserved_tokens, sequence.row = 0, -1
        self.requests.clear()
        self.by_sequence.clear()
        self.waiting.clear()
        self.gates.clear()
        self.running.clear()
        self.finished.clear()
        self.free_rows = list(range(self.limits.max_num_seqs))
        self.pool = self.tables.pool = BlockPool(
            num_blocks=self.limits.num_blocks, placement=self._placement
        )

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        request.state = State.FINISHED
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        request.finished_s = self._events.now_s
        self.ended.append(request)
        self._events.add(
            Kind.FINISHED,
            request.request_id,
            num_tokens=request.num_output_tokens,
            row=request.sequence.row,
            detail=error or str(reason),
        )
        self.tell(Kind.FINISHED, request)

    def release(self) -> None:
        """Finished requests let go of rows and memory, and are forgotten."""
        for request in self.finished:
            self._log_released(request)
            self._let_go(request)
            self._forget(request)
        self.finished.clear()

    def _log_released(self, request: Request) -> None:
        num_blocks = sum([len(sequence.block_table) for sequence in request.sequences])
        self._events.add(
            Kind.RELEASED,
            request.request_id,
            num_tokens=num_blocks * self.limits.block_size,
            row=request.sequence.row,
        )

    def _let_go(self, request: Request) -> None:
        self.tables.let_go(request)
        for sequence in request.sequences:
            heappush(self.free_rows, sequence.row)
            sequence.row = -1

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        for sequence in request.sequences:
            del self.by_sequence[sequence.sequence_id]
