"""Who waits, who runs, who is finished but not released; and the rows and blocks they hold.

Owns: membership, rows, and (through `kv/`) blocks. In: decisions of `planning.py` and results from
`scheduler.py`. Out: the current membership, and events. Must not know: budgets, batching policies.
"""

from collections.abc import Sequence as SequenceOf
from functools import partial
from heapq import heappop, heappush

from paxserve.admission import Seen
from paxserve.events import EventLog, Kind
from paxserve.gates import Gates
from paxserve.kv.block_pool import NO_MATCH, BlockPool, Match
from paxserve.kv.block_table import BlockTables
from paxserve.kv.host_pool import HostPool
from paxserve.limits import Limits
from paxserve.policies import Policies
from paxserve.request import FinishReason, Request, Sequence, State, set_computed
from paxserve.waiting import WaitingQueue


class Batch:
    """Every live request is in exactly one of `waiting`, `running`, `finished`. `ended` collects
    those that finished until somebody takes them; `dead` are sequences that ended before their
    request did, and are not released yet. `groups` are the running requests of several sequences,
    `begun` the sequences that have not come to the end of what they entered with.
    `num_hit_tokens` of the `num_entered_tokens` that entered were found in the prefix cache.

    Invariants: the rows of running, finished and dead sequences and the free rows are all rows,
    once each; a block is held by as many tables as it has references; a waiting request holds
    neither row nor block of the device.
    """

    def __init__(self, *, limits: Limits, policies: Policies, events: EventLog) -> None:
        self.limits = limits
        self.policies = policies
        self.pool = self._new_pool()
        self.tables = BlockTables(pool=self.pool, reservation=policies.reservation, limits=limits)
        self.host_pool = HostPool(limits.num_host_blocks)
        self.waiting = WaitingQueue(policies.admission)
        self.gates = Gates(policies.gates)
        self.running: list[Request] = []
        self.groups: set[Request] = set()
        self.begun: set[Sequence] = set()
        self.finished: list[Request] = []
        self.dead: list[Sequence] = []
        self.ended: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.by_sequence: dict[int, tuple[Request, Sequence]] = {}
        self.free_rows = list(range(limits.max_num_seqs))
        self.num_hit_tokens = 0
        self.num_entered_tokens = 0
        self._num_admitted = 0
        self._matches: dict[Request, Match] = {}
        self._events = events

    def _new_pool(self) -> BlockPool:
        return BlockPool(
            num_blocks=self.limits.num_blocks,
            placement=self.policies.placement,
            new_index=partial(self.policies.prefix_cache.open, self.limits.block_size),
            eviction=self.policies.eviction,
        )

    def add(self, request: Request) -> None:
        """A new request waits."""
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        self.by_sequence |= {s.sequence_id: (request, s) for s in request.sequences}
        self._events.add(Kind.ARRIVED, request.request_id, num_tokens=request.num_prompt_tokens)
        self.see(Kind.ARRIVED, request)
        self.waiting.push(request)

    def enter(self, request: Request) -> None:
        """A waiting request, whose tables hold its memory already, takes the lowest free rows."""
        self.waiting.remove(request)
        self._matches.pop(request, None)
        self.running.append(request)
        if len(request.sequences) > 1:
            self.groups.add(request)
        request.state = State.RUNNING
        request.admitted_seq = self._num_admitted
        request.num_entry_output_tokens = request.num_output_tokens
        self._num_admitted += 1
        for sequence in request.live:
            sequence.row = heappop(self.free_rows)
            sequence.num_entry_tokens = sequence.num_known_tokens
            self.begun.add(sequence)
        self.see(Kind.ENTERED, request)

    def withdraw(self, request: Request, *, keeps_computed: bool = False) -> None:
        """A running request waits again, and holds nothing on the device. `keeps_computed`: the
        host holds what was computed, so it will not be computed again.
        """
        self.running.remove(request)
        self.groups.discard(request)
        self._let_go(request)
        if len(request.live) < len(request.sequences):
            self._let_go_of_dead(request)
        request.state = State.WAITING
        if not keeps_computed:
            for sequence in request.live:
                set_computed(sequence, 0)
                sequence.source = None
        self.see(Kind.PREEMPTED, request)
        self.waiting.push(request)

    def preempt(
        self, request: Request, *, num_lost_tokens: int, method: str, keeps_computed: bool = False
    ) -> None:
        """A running request gives up row and memory, keeps its tokens, and waits again."""
        self._events.add(
            Kind.PREEMPTED,
            request.request_id,
            num_tokens=num_lost_tokens,
            row=_only_row(request),
            detail=method,
        )
        request.num_preemptions += 1
        request.num_lost_tokens += num_lost_tokens
        self.withdraw(request, keeps_computed=keeps_computed)

    def publish(self, request: Request, sequence: Sequence) -> list[int]:
        """Offer full blocks to the prefix cache; returns those that can be found from now on."""
        start, block_size = sequence.num_published_blocks, self.limits.block_size
        end = min(sequence.num_computed_tokens, len(sequence.token_ids)) // block_size
        if end <= start:
            return []
        sequence.num_published_blocks = end
        return self.pool.publish(
            sequence.token_ids,
            sequence.block_table[:end],
            salt=request.origin.cache_salt,
            start=start,
        )

    def hits(self, request: Request) -> list[int]:
        """The blocks of a waiting request that the prefix cache has now, short of its last token:
        that must be computed to sample from it.
        """
        trunk = request.trunk
        match = self.pool.match(
            trunk.token_ids,
            salt=request.origin.cache_salt,
            num_blocks=(trunk.num_known_tokens - 1) // self.limits.block_size,
            earlier=self._matches.get(request, NO_MATCH),
        )
        self._matches[request] = match
        return match.block_ids

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the prefix cache has now."""
        return len(self.hits(request)) * self.limits.block_size

    def see(
        self,
        kind: Kind,
        request: Request | None,
        *,
        num_tokens: int = 0,
        num_outputs: int = 0,
        duration_s: float = 0.0,
    ) -> None:
        """Tell the policies that learn."""
        if self.waiting.learns or self.gates.learns:
            seen = Seen(kind, self._events.now_s, request, num_tokens, num_outputs, duration_s)
            self.waiting.tell(seen)
            self.gates.tell(seen)

    def finish_sequence(
        self, request: Request, sequence: Sequence, reason: FinishReason, stop: int | str | None
    ) -> None:
        """One sequence has ended; with the last one the request ends too, as its first did."""
        sequence.finish_reason, sequence.stop_reason = reason, stop
        if len(request.live) > 1:
            request.live.remove(sequence)
            self.dead.append(sequence)
        else:
            first = request.sequences[0]
            self.finish(request, first.finish_reason or reason, stop_reason=first.stop_reason)

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
            self.groups.discard(request)
            self.finished.append(request)
            self._end(request, reason, stop_reason=stop_reason, error=error)
        else:
            self.waiting.remove(request)
            self.give_back_host_blocks(request)
            self._end(request, reason, stop_reason=stop_reason, error=error)
            self._forget(request)

    def fail_all(self, error: str) -> None:
        """A change broke off in the middle: every live request ends, and what they held is made
        anew, since it can no longer be told who holds what.
        """
        for request in self.requests.values():
            if request.state is not State.FINISHED:
                self._end(request, FinishReason.ERROR, error=error)
            self._log_released(request, [s for s in request.sequences if s.row >= 0])
            for sequence in request.sequences:
                sequence.block_table.clear()
                sequence.host_blocks.clear()
                sequence.num_reserved_tokens, sequence.row, sequence.source = 0, -1, None
        self._matches.clear()
        self.requests.clear()
        self.by_sequence.clear()
        self.waiting.clear()
        self.gates.clear()
        self.running.clear()
        self.groups.clear()
        self.begun.clear()
        self.finished.clear()
        self.dead.clear()
        self.free_rows = list(range(self.limits.max_num_seqs))
        self.host_pool = HostPool(self.limits.num_host_blocks)
        self.pool = self._new_pool()
        self.tables = BlockTables(
            pool=self.pool, reservation=self.policies.reservation, limits=self.limits
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
        for sequence in request.live:
            if sequence.finish_reason is None:
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        request.finished_s = self._events.now_s
        self.ended.append(request)
        self._events.add(
            Kind.FINISHED,
            request.request_id,
            num_tokens=request.num_output_tokens,
            row=_only_row(request),
            detail=error or str(reason),
        )
        self.see(Kind.FINISHED, request)

    def release(self) -> None:
        """Finished requests let go of rows and memory, and are forgotten; so do dead sequences."""
        for sequence in self.dead:
            request, _ = self.by_sequence[sequence.sequence_id]
            self._log_released(request, [sequence])
            self._let_go_of(sequence)
        self.dead.clear()
        for request in self.finished:
            self._log_released(request, request.live)
            self._let_go(request)
            self._forget(request)
        self.finished.clear()

    def _log_released(self, request: Request, sequences: SequenceOf[Sequence]) -> None:
        """Each row, with the slots of its blocks that no row before it had."""
        seen: set[int] = set()
        for sequence in sequences:
            own = set(sequence.block_table) - seen
            seen |= own
            self._events.add(
                Kind.RELEASED,
                request.request_id,
                num_tokens=len(own) * self.limits.block_size,
                row=sequence.row,
            )

    def _let_go(self, request: Request) -> None:
        for sequence in reversed(request.live):
            self._let_go_of(sequence)

    def _let_go_of_dead(self, request: Request) -> None:
        """Sequences of a request that leaves before its batch dissolves do not stay behind."""
        for sequence in [s for s in self.dead if s in request.sequences]:
            self.dead.remove(sequence)
            self._let_go_of(sequence)

    def _let_go_of(self, sequence: Sequence) -> None:
        self.begun.discard(sequence)
        self.tables.let_go(sequence)
        if sequence.row >= 0:
            heappush(self.free_rows, sequence.row)
            sequence.row = -1

    def give_back_host_blocks(self, request: Request) -> None:
        """The host need not keep what it holds of a request."""
        held = {block_id for sequence in request.live for block_id in sequence.host_blocks}
        self.host_pool.give_back(sorted(held))
        for sequence in request.live:
            sequence.host_blocks.clear()

    def _forget(self, request: Request) -> None:
        self._matches.pop(request, None)
        del self.requests[request.request_id]
        for sequence in request.sequences:
            del self.by_sequence[sequence.sequence_id]


def _only_row(request: Request) -> int:
    """The row of a request with one sequence; -1 where an event is of several rows, or of none."""
    return request.sequences[0].row if len(request.sequences) == 1 else -1
