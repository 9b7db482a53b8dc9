"""One step being decided: the batching policy proposes, this answers, a `StepPlan` comes out.

Owns: the token budget of the step, and the grants. In: the batch and the policies. Out: the plan.
Must not know: token values beyond those a row needs as input, results, time.

Its three hands: `decoding.py` grants decodes in bulk, `admitting.py` lets a waiting request in,
`preempting.py` makes a running one leave; what the step has been given so far lies in `draft.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paxserve.admitting import Admitting, Refusal
from paxserve.batch import Batch
from paxserve.batching import Admit, Decodes, Grant, Proposal, Reason, Verdict
from paxserve.decoding import Decoding
from paxserve.draft import StepDraft
from paxserve.events import UNASKED, EventLog, Kind
from paxserve.forks import Claim, num_grantable, reads_again, spread
from paxserve.policies import Policies
from paxserve.preempting import Preempting
from paxserve.request import FinishReason, Request, State
from paxserve.step import RowPlan, StepPlan


class HeldBack(NamedTuple):
    """Why the head of the queue did not enter; `is_first`: before anything was granted."""

    request_id: str
    num_tokens: int
    why: str
    is_first: bool


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
        self._draft = draft = StepDraft(budget_left=batch.limits.max_num_batched_tokens)
        self._batch = batch
        self._policies = policies
        self._events = events
        self._refused_head: Request | None = None
        self._refusals: list[Reason] = []
        self._held_back: list[HeldBack] = []
        self._admitting = Admitting(batch=batch, draft=draft, events=events)
        self._decoding = Decoding(batch=batch, policies=policies, draft=draft, events=events)
        self._preempting = Preempting(batch=batch, policies=policies, draft=draft, events=events)
        cache = policies.prefix_cache
        self._publishes = cache.shares and cache.publish == "planning"
        batch.waiting.order(batch.num_cached_tokens)

    # What the policy sees.

    @property
    def running(self) -> tuple[Request, ...]:
        """See `View.running`."""
        return tuple(self._batch.running)

    @property
    def budget_left(self) -> int:
        """See `View.budget_left`."""
        return self._draft.budget_left

    @property
    def num_changed(self) -> int:
        """Requests that were preempted, held back after all, or ended in this step."""
        return self._draft.num_preempted + self._draft.num_failed

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

    def preempt(self, requests: Iterable[Request], why: str) -> None:
        """Preempt running requests whatever the memory."""
        for request in requests:
            self._preempting.preempt(request, why=why)

    def to_plan(self, step_id: int) -> StepPlan | None:
        """The finished plan, or None if nothing is to be done."""
        newcomers = list(self._draft.newcomers)
        if not self._draft.rows and newcomers and not self.num_changed:
            raise RuntimeError(
                f"{type(self._policies.batching).__name__} admitted "
                f"{[request.request_id for request in newcomers]} but computes nothing: the "
                "executor would miss them"
            )
        if not self._draft.rows:  # whoever was to be computed beside them made way
            self.preempt(newcomers, "")
        plan = self._draft.to_plan(step_id, self._batch, self._events)
        if plan is not None:
            self._note_silence()
        return plan

    @property
    def refusals(self) -> Sequence[Reason]:
        """The reasons for all that was refused in this step."""
        return self._refusals

    @property
    def held_back(self) -> Sequence[HeldBack]:
        """What was said of the head of the queue in this step."""
        return self._held_back

    def _admit(self, request: Request, num_tokens: int) -> Verdict:
        """Static batching's way in: a row and memory, nothing computed yet."""
        answer = self._let_in(request, num_tokens, num_budget=num_tokens, computes=False)
        if isinstance(answer, Refusal):
            return self._refuse(request, num_tokens, answer)
        num_granted = sum([claim.num_tokens for claim in answer])
        return Verdict(num_granted, num_cached_tokens=request.num_cached_tokens)

    def _grant(self, request: Request, num_tokens: int, num_kept: int) -> Verdict:
        self._check_grant(request, num_tokens)
        num_budget = self._draft.budget_left - num_kept
        num_before, num_cached = self._draft.num_preempted, 0
        if request.state is State.WAITING:
            answer = self._let_in(request, num_tokens, num_budget=num_budget)
            num_cached = request.num_cached_tokens
        else:
            answer = self._go_on(request, num_tokens, num_budget)
        num_preempted = self._draft.num_preempted - num_before
        if isinstance(answer, Refusal):
            return self._refuse(request, num_tokens, answer, num_preempted)
        num_granted = self._compute(request, answer)
        return Verdict(num_granted, num_cached_tokens=num_cached, num_preempted=num_preempted)

    def _decode(self, requests: Sequence[Request]) -> Verdict:
        """One token for each sequence of these requests, in order."""
        num_granted = self._decoding.decode(requests)
        return self._decode_in_turn(requests) if num_granted is None else Verdict(num_granted)

    def _decode_in_turn(self, requests: Sequence[Request]) -> Verdict:
        """One by one: for several sequences, a short budget, or short memory. Blocks are then
        published between two growths, so what is evicted may differ from the bulk.
        """
        draft = self._draft
        num_before, num_granted, refused = draft.num_preempted, 0, None
        for request in requests:
            if request.state is not State.RUNNING and request in draft.dropped:
                continue  # it made room for one before it, or outgrew the pool
            num_live = len(request.live)
            if request.state is not State.RUNNING or (num_live == 1 and not request.is_decode):
                raise self._wrong_grant(request, 1)
            num_tokens = request.num_remaining_tokens
            if num_tokens > num_live:  # a group larger than a step, and not done yet
                num_tokens = max(1, min(num_tokens, draft.budget_left))
            verdict = self._grant(request, num_tokens, 0)
            num_granted += verdict.num_tokens
            if verdict.refused is Reason.BUDGET:
                refused = Reason.BUDGET
                break
        return Verdict(num_granted, refused=refused, num_preempted=draft.num_preempted - num_before)

    # How it is done.

    def _check_grant(self, request: Request, num_tokens: int) -> None:
        in_range = 1 <= num_tokens <= request.num_remaining_tokens
        if not in_range or request.state is State.FINISHED or self._is_granted(request):
            raise self._wrong_grant(request, num_tokens)

    def _is_granted(self, request: Request) -> bool:
        rows = self._draft.rows
        return request.state is State.RUNNING and any(s.sequence_id in rows for s in request.live)

    def _wrong_grant(self, request: Request, num_tokens: int) -> RuntimeError:
        return RuntimeError(
            f"{type(self._policies.batching).__name__} granted {num_tokens} tokens to request "
            f"{request.request_id}, which is {request.state}, has {request.num_remaining_tokens} "
            f"to compute, and was granted in this step already: {self._is_granted(request)}"
        )

    def _let_in(
        self, request: Request, num_tokens: int, *, num_budget: int, computes: bool = True
    ) -> list[Claim] | Refusal:
        """Admit a waiting request, in the place of others if its order says so."""
        answer = self._admitting.admit(
            request, num_tokens, num_budget=num_budget, computes=computes
        )
        is_short = isinstance(answer, Refusal) and answer.reason is not Reason.BUDGET
        if not is_short or not self._policies.admission.displaces_running:
            return answer
        budget_before = self._draft.budget_left
        for displaced in self._displaced_by(request, num_tokens, num_budget):
            self._preempting.preempt(displaced, why=f"displaced by {request.request_id}")
        num_budget += self._draft.budget_left - budget_before
        return self._admitting.admit(request, num_tokens, num_budget=num_budget, computes=computes)

    def _displaced_by(self, request: Request, num_tokens: int, num_budget: int) -> list[Request]:
        """The running requests, last in rank first, in whose place this waiting one would enter;
        nobody if all that rank behind it would not be enough.
        """
        rank = self._batch.waiting.rank
        own, displaced = rank(request), []
        behind = [r for r in self._batch.running if rank(r) > own]
        for other in sorted(behind, key=lambda r: (rank(r), r.arrival_seq), reverse=True):
            displaced.append(other)
            if self._admitting.would_enter(
                request, num_tokens, num_budget=num_budget, without=displaced
            ):
                return displaced
        return []

    def _go_on(self, request: Request, num_tokens: int, num_budget: int) -> list[Claim] | Refusal:
        """Memory for more tokens of a running request."""
        largest_step = self.limits.max_num_batched_tokens
        num_tokens = num_grantable(
            request, num_tokens, num_budget=num_budget, largest_step=largest_step
        )
        if not num_tokens:
            return Refusal(Reason.BUDGET)
        claims = spread(request, num_tokens)
        return claims if self._make_room(request, claims) else Refusal(Reason.BLOCKS)

    def _make_room(self, request: Request, claims: Sequence[Claim]) -> bool:
        """Slots for the next tokens of a running request, preempting until they are found."""
        tables = self._batch.tables
        while not self._hold(request, claims):
            num_held = len({b for s in request.live for b in s.block_table})
            num_needed = num_held + tables.num_missing_blocks(request, claims)
            if num_needed > self.limits.num_usable_blocks or self._is_too_long(request, claims):
                self._fail(request, num_needed)
                return False
            victim = min(self._batch.running, key=self._policies.victim.key)
            self._preempting.preempt(victim)
            if request.state is not State.RUNNING:
                return False
        return True

    def _hold(self, request: Request, claims: Sequence[Claim]) -> bool:
        """Slots for the next tokens of a running request, if they are to be had."""
        pool, touched = self._batch.pool, self._draft.touched
        num_evicted = pool.num_evicted
        if not self._batch.tables.hold(request, claims):
            return False
        if pool.num_evicted > num_evicted:
            self._log_evicted(request, pool.num_evicted - num_evicted)
        for sequence, _ in claims:
            touched[sequence.sequence_id] = sequence
        return True

    def _log_evicted(self, request: Request, num_blocks: int) -> None:
        num_slots = num_blocks * self.limits.block_size
        self._events.add(Kind.EVICTED, request.request_id, num_tokens=num_slots)

    def _is_too_long(self, request: Request, claims: Sequence[Claim]) -> bool:
        """Whether one of the tables would not lie anywhere even in an empty pool."""
        tables, longest = self._batch.tables, self._batch.pool.largest_table
        ends = [claim.sequence.num_computed_tokens + claim.num_tokens for claim in claims]
        return any(tables.num_blocks_needed(request, end) > longest for end in ends)

    def _compute(self, request: Request, claims: Sequence[Claim]) -> int:
        """The claimed tokens become rows; returns how many there are."""
        draft, num_granted = self._draft, 0
        for sequence, num_tokens in claims:
            first = sequence.num_computed_tokens
            end = first + num_tokens
            num_samples = int(num_tokens == sequence.num_remaining_tokens)
            if sequence.source is not None:
                if reads_again(sequence):
                    draft.unwritten.add(sequence.sequence_id)
                draft.started[sequence] = sequence.source
                sequence.source = None
                sequence.num_published_blocks = first // self.limits.block_size
            on_device = num_tokens == 1 and first >= sequence.num_entry_tokens
            if end >= sequence.num_entry_tokens:
                self._batch.begun.discard(sequence)
            sequence.num_computed_tokens = end
            sequence.num_remaining_tokens += num_samples - num_tokens
            row = RowPlan(
                sequence_id=sequence.sequence_id,
                row=sequence.row,
                first_position=first,
                num_tokens=num_tokens,
                num_samples=num_samples,
                tokens=() if on_device else tuple(sequence.token_ids[first:end]),
            )
            draft.rows.add(row)
            if num_tokens > 1:
                draft.chunks[sequence.sequence_id] = row
            num_granted += num_tokens
            if self._publishes:
                draft.publish(self._batch, request, sequence)
        draft.budget_left -= num_granted
        return num_granted

    def _fail(self, request: Request, num_needed: int) -> None:
        self._preempting.drop(request)
        self._draft.num_failed += 1
        self._batch.finish(
            request,
            FinishReason.ERROR,
            error=(
                f"request {request.request_id} outgrew the KV pool: its next token needs "
                f"{num_needed} blocks, the pool has {self.limits.num_usable_blocks} of "
                f"{self.limits.block_size} tokens"
            ),
        )

    def _note_silence(self) -> None:
        """The head waits, and the batching policy has not asked for it."""
        head = self._batch.waiting.head()
        if head is None or head is self._refused_head or head in self._draft.dropped:
            return
        self._hold_back(head, head.num_remaining_tokens, UNASKED)

    def _refuse(
        self, request: Request, num_tokens: int, refusal: Refusal, num_preempted: int = 0
    ) -> Verdict:
        self._refusals.append(refusal.reason)
        is_head = self._batch.waiting.head() is request
        if is_head and request not in self._draft.dropped:
            self._refused_head = request
            reason, why = refusal
            self._hold_back(request, num_tokens, f"{reason}: {why}" if why else str(reason))
        return Verdict(0, refused=refusal.reason, num_preempted=num_preempted)

    def _hold_back(self, head: Request, num_tokens: int, why: str) -> None:
        held_back = HeldBack(head.request_id, num_tokens, why, not self._draft.rows)
        self._held_back.append(held_back)
        log_held_back(self._events, held_back)


def log_held_back(events: EventLog, held_back: HeldBack) -> None:
    """One entry of the decision log."""
    request_id, num_tokens, why, _ = held_back
    events.add(Kind.HELD_BACK, request_id, num_tokens=num_tokens, detail=why)
