"""One step being decided: the batching policy proposes, this answers, a `StepPlan` comes out.

Owns: the token budget of the step, the grants, and what a shortage of memory leads to. In: the
batch and the policies. Out: the plan. Must not know: token values beyond those a row needs as
input, results, time.
"""

from collections.abc import Iterator, Sequence

from paxserve.batch import Batch
from paxserve.batching import Admit, Decodes, Grant, Proposal, Reason, Verdict
from paxserve.events import EventLog, Kind
from paxserve.gate import MemoryView
from paxserve.policies import Policies
from paxserve.preemption import Method, VictimView
from paxserve.request import FinishReason, Request, State
from paxserve.request import Sequence as TokenSequence
from paxserve.step import RowEntry, RowPlan, StepPlan, TableWrite

_new_tuple = tuple.__new__  # half the cost of RowPlan(...), on the path of every decoded token


class StepInMaking:
    """Answers proposals one by one. It is also the `View` that the policy looks at.

    Invariants: granted tokens + `budget_left` == max_num_batched_tokens; only running requests
    hold a grant; a request preempted in this step is not granted anything any more.
    """

    def __init__(
        self,
        *,
        batch: Batch,
        policies: Policies,
        events: EventLog,
        previous: StepPlan | None = None,
    ) -> None:
        self.limits = batch.limits
        self.previous = previous
        self.budget_left = batch.limits.max_num_batched_tokens
        self.num_preempted = 0
        self.num_failed = 0
        self._batch = batch
        self._policies = policies
        self._events = events
        self._rows: dict[int, RowPlan] = {}
        self._entries: dict[int, RowEntry] = {}
        self._table_starts: dict[int, int] = {}
        self._dropped: set[Request] = set()  # preempted, or ended, in this step

    # What the policy sees.

    @property
    def running(self) -> tuple[Request, ...]:
        """See `View.running`."""
        return tuple(self._batch.running)

    def waiting(self) -> Iterator[Request]:
        """See `View.waiting`."""
        return iter(self._batch.waiting)

    # What the policy gets.

    def answer(self, proposal: Proposal) -> Verdict:
        """Carry out a proposal as far as rows, budget and memory allow."""
        match proposal:
            case Decodes(requests):
                return self._decode(requests)
            case Admit(request, num_tokens):
                return self._admit(request, num_tokens)
            case Grant(request, num_tokens, num_kept):
                return self._grant(request, num_tokens, num_kept)

    def to_plan(self, step_id: int) -> StepPlan | None:
        """The finished plan, or None if nothing is computed."""
        if not self._rows:
            if self._entries:
                raise RuntimeError(
                    f"{type(self._policies.batching).__name__} admitted sequences "
                    f"{list(self._entries)} but computes nothing: the executor would miss them"
                )
            return None
        self._log_grants()
        return StepPlan(
            step_id=step_id,
            rows=tuple(self._rows.values()),
            entries=tuple(self._entries.values()),
            table_writes=tuple(self._table_writes()),
        )

    def _admit(self, request: Request, num_tokens: int) -> Verdict:
        reason = self._reason_to_hold_back(request, num_tokens)
        if reason is not None:
            return self._refuse(request, num_tokens, *reason)
        self._batch.enter(request)
        for sequence in request.sequences:
            self._table_starts[sequence.sequence_id] = 0
            self._entries[sequence.sequence_id] = RowEntry(
                sequence.sequence_id, sequence.row, request.num_prompt_tokens, request.sampling
            )
        return Verdict(num_tokens)

    def _grant(self, request: Request, num_tokens: int, num_kept: int) -> Verdict:
        in_range = 1 <= num_tokens <= request.num_remaining_tokens
        is_granted = request.sequence.sequence_id in self._rows
        if not in_range or is_granted or request.state is State.FINISHED:
            raise self._wrong_grant(request, num_tokens)
        if num_tokens * len(request.sequences) > self.budget_left - num_kept:
            return self._refuse(request, num_tokens, Reason.BUDGET)
        num_before = self.num_preempted
        if request.state is State.WAITING:
            verdict = self._admit(request, num_tokens)
            if verdict.refused:
                return verdict
        elif not self._make_room(request, num_tokens):
            return Verdict(0, refused=Reason.BLOCKS, num_preempted=self.num_preempted - num_before)
        for sequence in request.sequences:
            self._compute(sequence, num_tokens)
        return Verdict(num_tokens, num_preempted=self.num_preempted - num_before)

    def _decode(self, requests: Sequence[Request]) -> Verdict:
        """One token for each of many: the path of nearly every token, so the loop makes no calls
        but for a row's tuple, and for memory once in `block_size` tokens.
        """
        num_before, budget_before, refused = self.num_preempted, self.budget_left, None
        block_size, rows, running = self.limits.block_size, self._rows, State.RUNNING
        for request in requests:
            if request.state is not running:
                if request in self._dropped:
                    continue  # it made room for one before it, or outgrew the pool
                raise self._wrong_grant(request, 1)
            if not self.budget_left:
                refused = Reason.BUDGET
                break
            sequence = request.sequences[0]
            position, sequence_id = sequence.num_computed_tokens, sequence.sequence_id
            if sequence.num_known_tokens - position != 1 or sequence_id in rows:
                raise self._wrong_grant(request, 1)
            is_full = position == len(sequence.block_table) * block_size
            if is_full and not self._make_room(request, 1):
                continue
            on_device = position >= sequence.num_entry_tokens
            tokens = () if on_device else (sequence.token_ids[position],)
            sequence.num_computed_tokens = position + 1
            sequence.num_known_tokens = position + 2
            rows[sequence_id] = _new_tuple(
                RowPlan, (sequence_id, sequence.row, position, 1, 1, tokens)
            )
            self.budget_left -= 1
        return Verdict(
            max(0, budget_before - self.budget_left),
            refused=refused,
            num_preempted=self.num_preempted - num_before,
        )

    # How it is done.

    def _wrong_grant(self, request: Request, num_tokens: int) -> RuntimeError:
        return RuntimeError(
            f"{type(self._policies.batching).__name__} granted {num_tokens} tokens to request "
            f"{request.request_id}, which is {request.state}, has {request.num_remaining_tokens} "
            f"to compute, and was granted in this step already: "
            f"{request.sequence.sequence_id in self._rows}"
        )

    def _compute(self, sequence: TokenSequence, num_tokens: int) -> None:
        first, known = sequence.num_computed_tokens, sequence.num_known_tokens
        end = first + num_tokens
        on_device = num_tokens == 1 and first >= sequence.num_entry_tokens
        sequence.num_computed_tokens = end
        sequence.num_known_tokens += int(end == known)
        self._rows[sequence.sequence_id] = RowPlan(
            sequence_id=sequence.sequence_id,
            row=sequence.row,
            first_position=first,
            num_tokens=num_tokens,
            num_samples=int(end == known),
            tokens=() if on_device else tuple(sequence.token_ids[first:end]),
        )
        self.budget_left -= num_tokens

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Slots for `num_tokens` more of a running request, preempting until they are found."""
        target = request.sequence.num_computed_tokens + num_tokens
        tables = self._batch.tables
        self._note_tables(request)
        while not tables.hold(request, target):
            num_needed = tables.num_blocks_needed(request, target) * len(request.sequences)
            if num_needed > self.limits.num_usable_blocks:
                self._fail(request, num_needed)
                return False
            victim = min(self._batch.running, key=self._policies.victim.key)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Take a running request's memory and what it was granted in this step."""
        num_lost, is_newcomer = 0, victim.sequence.sequence_id in self._entries
        for sequence in victim.sequences:
            returned = self._rows.pop(sequence.sequence_id, None)
            num_lost += sequence.num_computed_tokens
            if returned is not None:
                self.budget_left += returned.num_tokens
                sequence.num_known_tokens -= returned.num_samples
                num_lost -= returned.num_tokens
            self._entries.pop(sequence.sequence_id, None)
            self._table_starts.pop(sequence.sequence_id, None)
        self._dropped.add(victim)
        self.num_preempted += 1
        if is_newcomer:  # it never ran here, so it is held back, not preempted
            self._batch.withdraw(victim)
            num_tokens = victim.num_remaining_tokens
            self._log_held_back(victim, num_tokens, str(Reason.BLOCKS))
            return
        method = self._policies.preemption.choose(victim, VictimView(num_lost, 0, 0))
        if method is not Method.RECOMPUTE:
            raise RuntimeError(f"preemption method {method!r} is not known to the scheduler")
        self._batch.preempt(victim, num_lost_tokens=num_lost, method=str(method))

    def _fail(self, request: Request, num_needed: int) -> None:
        for sequence in request.sequences:
            self._table_starts.pop(sequence.sequence_id, None)
        self._dropped.add(request)
        self.num_failed += 1
        self._batch.finish(
            request,
            FinishReason.ERROR,
            error=(
                f"request {request.request_id} outgrew the KV pool: its next token needs "
                f"{num_needed} blocks, the pool has {self.limits.num_usable_blocks} of "
                f"{self.limits.block_size} tokens"
            ),
        )

    def _reason_to_hold_back(
        self, request: Request, num_tokens: int
    ) -> tuple[Reason] | tuple[Reason, str] | None:
        if request in self._dropped:
            return (Reason.BLOCKS,)
        if len(request.sequences) > len(self._batch.free_rows):
            return (Reason.ROWS,)
        tables = self._batch.tables
        memory = MemoryView(
            num_usable=self.limits.num_usable_blocks,
            num_free=self._batch.pool.num_free,
            num_needed=tables.num_blocks_needed(request, num_tokens) * len(request.sequences),
        )
        for gate in self._policies.gates:
            if (why := gate.refusal(None, request, memory)) is not None:
                return Reason.GATE, why
        return None if tables.hold(request, num_tokens) else (Reason.BLOCKS,)

    def _refuse(self, request: Request, num_tokens: int, reason: Reason, why: str = "") -> Verdict:
        is_head = next(self.waiting(), None) is request
        if is_head and request not in self._dropped:
            self._log_held_back(request, num_tokens, f"{reason}: {why}" if why else str(reason))
        return Verdict(0, refused=reason)

    def _log_held_back(self, request: Request, num_tokens: int, detail: str) -> None:
        self._events.add(Kind.HELD_BACK, request.request_id, num_tokens=num_tokens, detail=detail)

    def _log_grants(self) -> None:
        """Who entered and who computes a chunk, now that no grant can be returned any more."""
        for sequence_id, entry in self._entries.items():
            request, sequence = self._batch.by_sequence[sequence_id]
            if request.first_scheduled_s is None:
                request.first_scheduled_s = self._events.now_s
            self._events.add(
                Kind.ENTERED,
                request.request_id,
                num_tokens=sequence.num_entry_tokens,
                row=entry.row,
            )
        for row in self._rows.values():
            if row.num_tokens > 1:
                request, _ = self._batch.by_sequence[row.sequence_id]
                self._events.add(
                    Kind.CHUNK, request.request_id, num_tokens=row.num_tokens, row=row.row
                )

    def _note_tables(self, request: Request) -> None:
        for sequence in request.sequences:
            self._table_starts.setdefault(sequence.sequence_id, len(sequence.block_table))

    def _table_writes(self) -> Iterator[TableWrite]:
        for sequence_id, start in self._table_starts.items():
            _, sequence = self._batch.by_sequence[sequence_id]
            if len(sequence.block_table) > start:
                yield TableWrite(sequence.row, start, tuple(sequence.block_table[start:]))
