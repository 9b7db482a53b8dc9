"""The scheduler: requests in, a `StepPlan` per step out, results applied.

Owns: the cycle retire -> plan -> apply over `batch.py` (who holds what), `planning.py` (one step's
decisions) and `results.py` (what a step's tokens do to a request). In: requests, aborts, step
results, the time. Out: plans and events. Must not know: jax, text, how a plan is executed.

A plan is made from counts, never from token values: computed tokens and pending samples advance
when the plan is made, token values arrive with `apply`.
"""

from collections.abc import Callable
from typing import NamedTuple

from paxserve.batch import Batch
from paxserve.batching import Reason
from paxserve.events import EventLog, Kind
from paxserve.forking import advance_beams
from paxserve.limits import Limits
from paxserve.planning import HeldBack, StepInMaking
from paxserve.policies import Policies
from paxserve.request import FinishReason, Request, Sequence, State
from paxserve.step import Outputs, RowOutput, StepPlan, StepResult

type FindStop = Callable[[Request, Sequence], str | None]


def _no_stop(request: Request, sequence: Sequence) -> None:
    return None


class Repeatable(NamedTuple):
    """A step of decodes, and what was said of the head of the queue in it, None if nobody waited.
    `num_changes` of the queue when it had been planned.
    """

    plan: StepPlan
    held_back: HeldBack | None
    num_changes: int


class Scheduler:
    """Drives the policies; they only answer questions, and every answer is checked."""

    def __init__(self, *, limits: Limits, policies: Policies, events: EventLog) -> None:
        policies.check(limits)
        self.limits = limits
        self.policies = policies
        self.events = events
        self.batch = Batch(limits=limits, policies=policies, events=events)
        self._previous: StepPlan | None = None
        self._to_preempt: dict[Request, str] = {}
        self._num_empty = 0  # plans in a row that were empty
        self._repeatable: Repeatable | None = None
        self._are_steady = policies.are_steady and not limits.preempt_every_steps
        cache = policies.prefix_cache
        self._publishes = cache.shares and cache.publish == "after_step"

    @property
    def has_work(self) -> bool:
        """Whether any request waits, runs, is not released, or has an end that nobody has taken."""
        return bool(self.batch.requests or self.batch.ended)

    def add(self, request: Request, *, now_s: float) -> None:
        """A request arrives and waits; its id is its own (see `Intake`)."""
        self.events.now_s = now_s
        self.batch.add(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        now_s: float,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a request from outside, with all its sequences: an abort."""
        self.events.now_s = now_s
        self.batch.finish(request, reason, stop_reason=stop_reason, error=error)

    def stop(self, request: Request, sequence: Sequence, stop: str, *, now_s: float) -> None:
        """A stop string was found in the text of one sequence."""
        self.events.now_s = now_s
        self.batch.finish_sequence(request, sequence, FinishReason.STOP, stop)

    def preempt(self, request: Request, *, why: str = "asked for") -> None:
        """Preempt a running request when the next step is planned."""
        self._to_preempt[request] = why

    def fail_all(self, error: str, *, now_s: float) -> None:
        """A step failed: every live request ends with this error, and nothing is held any more."""
        self.events.now_s = now_s
        self._previous = self._repeatable = None
        self._to_preempt.clear()
        self.batch.fail_all(error)

    def reject(self, request_id: str, *, reason: str, now_s: float) -> None:
        """A request was refused at the door; only the event log hears of it."""
        self.events.now_s = now_s
        self.events.add(Kind.REJECTED, request_id, detail=reason)

    def take_ended(self) -> list[Request]:
        """Requests that have ended since this was last asked."""
        ended, self.batch.ended = self.batch.ended, []
        return ended

    def retire(self) -> None:
        """Finished requests release rows and memory, when the batching policy says so."""
        if self.policies.batching.release == "at_finish" or not self.batch.running:
            self.batch.release()

    def plan(self, *, now_s: float) -> StepPlan | None:
        """Decide one step; None when nothing is to be computed in it."""
        events = self.events
        events.begin_step(now_s)
        self._tell_time(now_s)
        step = StepInMaking(
            batch=self.batch, policies=self.policies, events=events, previous=self._previous
        )
        self._preempt_as_asked(step)
        proposals = self.policies.batching.propose(step)
        try:
            proposal = next(proposals)
            while True:
                proposal = proposals.send(step.answer(proposal))
        except StopIteration:
            plan = step.to_plan(events.step_id)
        self._num_empty = 0 if plan is not None else self._num_empty + 1
        self.batch.waiting.forget_order()
        if plan is None and (not step.num_changed or self._num_empty > 1):
            self._fail_stuck_head()
        self._previous = plan
        self._repeatable = self._as_repeatable(step, plan) if self._are_steady else None
        return plan

    @property
    def repeatable(self) -> Repeatable | None:
        """The last step, if the next one will be the same but for the positions of its rows: all
        that run decode, in the order of its rows, and nobody came or went since it was planned.
        """
        batch, found = self.batch, self._repeatable
        if found is None or self._to_preempt or batch.ended or batch.finished or batch.dead:
            return None
        is_same = len(batch.running) == len(found.plan.rows) and not batch.begun
        return found if is_same and batch.waiting.num_changes == found.num_changes else None

    def repeated(self, found: Repeatable, plan: StepPlan) -> None:
        """It came again, the last time as this plan."""
        self._previous, self._repeatable = plan, found._replace(plan=plan)

    def _as_repeatable(self, step: StepInMaking, plan: StepPlan | None) -> Repeatable | None:
        """A step in which all that run decode, if what was refused in it would be refused again,
        and for the same reason, though requests grow and their blocks become known to the cache.
        """
        batch, policies = self.batch, self.policies
        if plan is None or not plan.columns.are_decodes or step.num_changed:
            return None
        if len(batch.waiting):
            if policies.admission.displaces_running or batch.waiting.reorders:
                return None
            lasting = {Reason.ROWS}
            if not policies.gates and not policies.prefix_cache.shares:
                lasting |= {Reason.BLOCKS, Reason.BUDGET}
            if len(step.held_back) != 1 or not lasting.issuperset(step.refusals):
                return None
        held_back = step.held_back[0] if step.held_back else None
        return Repeatable(plan, held_back, batch.waiting.num_changes)

    def apply(
        self,
        plan: StepPlan,
        result: StepResult,
        *,
        now_s: float,
        find_stop: FindStop = _no_stop,
    ) -> list[Request]:
        """Sampled tokens reach their requests.

        Args:
            plan, result: of one and the same step.
            now_s: when the tokens arrived.
            find_stop: asked before a sequence ends by length, whether its text ends in a stop.

        Returns:
            Requests that got a token, or failed to. A row whose request was aborted while the step
            ran is dropped; one that was preempted by the plan of the next step gets its token.

        Raises:
            RuntimeError: the result belongs to another step.
        """
        if result.step_id != plan.step_id:
            raise RuntimeError(f"result of step {result.step_id} applied to step {plan.step_id}")
        self.events.now_s = now_s
        batch = self.batch
        progressed: list[Request] = []
        add = progressed.append
        find, has_groups = batch.by_sequence.get, bool(batch.groups)
        beams: dict[Request, dict[Sequence, RowOutput]] = {}
        sampled = Outputs.of(result.outputs)
        rows = zip(plan.columns.sequence_ids, sampled.tokens, sampled.logprobs, strict=True)
        for sequence_id, token, logprobs in rows:
            if token is None or (found := find(sequence_id)) is None:
                continue
            request, sequence = found
            if sequence.finish_reason is not None:
                continue
            add(request)
            if token < 0:
                self._fail_not_finite(request)
                continue
            if has_groups and request.beams is not None:
                beams.setdefault(request, {})[sequence] = RowOutput((token,), logprobs)
                continue
            token_ids = sequence.token_ids
            token_ids.append(token)
            sequence.token_times_s.append(now_s)
            if logprobs:
                sequence.logprobs.extend(logprobs)
            if token in request.stop_ids and self._may_stop(request, sequence):
                eos = token not in request.params.stop_token_ids
                batch.finish_sequence(request, sequence, FinishReason.STOP, None if eos else token)
            elif len(token_ids) >= request.max_known_tokens:
                stop = find_stop(request, sequence)
                reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
                batch.finish_sequence(request, sequence, reason, stop)
        if has_groups:
            progressed = list(dict.fromkeys(progressed))
        for request, outputs in beams.items():
            if request.state is State.RUNNING:
                advance_beams(batch, request, outputs, now_s=now_s)
        self._after_step(plan, result)
        return progressed

    def _may_stop(self, request: Request, sequence: Sequence) -> bool:
        """Whether a sequence that has an end token is long enough for it to count."""
        num_output = len(sequence.token_ids) - request.num_prompt_tokens
        return num_output > request.params.min_tokens

    def _after_step(self, plan: StepPlan, result: StepResult) -> None:
        """What was computed is valid now: publish it, and tell policies who was served."""
        batch = self.batch
        if not (self._publishes or batch.waiting.learns or batch.gates.learns):
            return
        served: dict[Request, list[int]] = {}
        for row in plan.rows:
            request, sequence = batch.by_sequence.get(row.sequence_id, (None, None))
            if request is None or sequence is None:
                continue
            has_ended = request.state is State.FINISHED  # beams are ranked then, or logits failed
            is_sound = not has_ended or (
                request.beams is None and request.finish_reason is not FinishReason.ERROR
            )
            if self._publishes and sequence.block_table and is_sound:
                batch.publish(request, sequence)
            counts = served.setdefault(request, [0, 0])
            counts[0] += row.num_tokens
            counts[1] += row.num_samples
        for request, (num_tokens, num_outputs) in served.items():
            batch.see(
                Kind.SERVED,
                request,
                num_tokens=num_tokens,
                num_outputs=num_outputs,
                duration_s=result.duration_s,
            )

    def _tell_time(self, now_s: float) -> None:
        timer_s = self.batch.waiting.next_timer_s()
        if timer_s is not None and timer_s <= now_s:
            self.batch.see(Kind.TIMER, None)

    def _preempt_as_asked(self, step: StepInMaking) -> None:
        """Preemptions asked for from outside, and the regular one of `preempt_every_steps`.

        The regular one spares requests that have not sampled since they entered: they would never
        end.
        """
        running, every = self.batch.running, self.limits.preempt_every_steps
        for request, why in self._to_preempt.items():
            if request in running:
                step.preempt([request], why)
        self._to_preempt.clear()
        if every and self.events.step_id % every == 0:
            moved = [r for r in running if r.num_output_tokens > r.num_entry_output_tokens]
            if moved:
                step.preempt([min(moved, key=self.policies.victim.key)], "forced")

    def _fail_not_finite(self, request: Request) -> None:
        """What a request without finite logits has written is not worth finding."""
        message = f"request {request.request_id}: the model's logits are not finite"
        self.batch.finish(request, FinishReason.ERROR, error=message)
        self.batch.pool.forget_all()

    def _fail_stuck_head(self) -> None:
        """Nothing was computed and nobody made way for it: never spin.

        With nothing running, a head that cannot enter now never will, so it is ended.
        """
        batch = self.batch
        if batch.running:
            raise RuntimeError(
                f"{type(self.policies.batching).__name__} computes nothing though "
                f"{len(batch.running)} requests run: the engine would spin"
            )
        head = batch.waiting.head()
        if head is None or batch.finished or batch.dead:
            return
        message = (
            f"request {head.request_id} cannot be scheduled: nothing else runs, and its "
            f"{head.num_remaining_tokens} tokens do not enter with "
            f"{batch.pool.num_available} free blocks of {self.limits.block_size} tokens and a "
            f"budget of {self.limits.max_num_batched_tokens} tokens per step"
        )
        batch.finish(head, FinishReason.ERROR, error=message)
