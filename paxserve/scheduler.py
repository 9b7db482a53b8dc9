"""The scheduler: requests in, a `StepPlan` per step out, results applied.

Owns: the cycle retire -> plan -> apply over `batch.py` (who holds what) and `planning.py` (one
step's decisions). In: requests, aborts, step results, the time. Out: plans and events. Must not
know: jax, text, how a plan is executed.

A plan is made from counts, never from token values: computed tokens and pending samples advance
when the plan is made, token values arrive with `apply`.
"""

from collections.abc import Callable

from paxserve.batch import Batch
from paxserve.events import EventLog, Kind
from paxserve.limits import Limits
from paxserve.planning import StepInMaking
from paxserve.policies import Policies
from paxserve.request import FinishReason, Request, State
from paxserve.step import StepPlan, StepResult


class Scheduler:
    """Drives the policies; they only answer questions, and every answer is checked."""

    def __init__(self, *, limits: Limits, policies: Policies, events: EventLog) -> None:
        policies.check(limits)
        self.limits = limits
        self.policies = policies
        self.events = events
        self._previous: StepPlan | None = None
        self.batch = Batch(
            limits=limits,
            admission=policies.admission,
            reservation=policies.reservation,
            placement=policies.placement,
            events=events,
        )

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
        """End a request from outside: an abort, or a stop string found in its text."""
        self.events.now_s = now_s
        self.batch.finish(request, reason, stop_reason=stop_reason, error=error)

    def fail_all(self, error: str, *, now_s: float) -> None:
        """A step failed: every live request ends with this error, and nothing is held any more."""
        self.events.now_s = now_s
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
        events.now_s = now_s
        events.step_id += 1
        step = StepInMaking(
            batch=self.batch, policies=self.policies, events=events, previous=self._previous
        )
        proposals = self.policies.batching.propose(step)
        try:
            proposal = next(proposals)
            while True:
                proposal = proposals.send(step.answer(proposal))
        except StopIteration:
            plan = step.to_plan(events.step_id)
        if plan is None and not step.num_preempted and not step.num_failed:
            self._fail_stuck_head()
        self._previous = plan or self._previous
        return plan

    def apply(
        self,
        plan: StepPlan,
        result: StepResult,
        *,
        now_s: float,
        find_stop: Callable[[Request], str | None] = lambda request: None,
    ) -> list[Request]:
        """Sampled tokens reach their requests.

        Args:
            plan, result: of one and the same step.
            now_s: when the tokens arrived.
            find_stop: asked before a request ends by length, whether its text ends in a stop.

        Returns:
            Requests that got a token, or failed to. A row whose request was aborted while the step
            ran is dropped.

        Raises:
            RuntimeError: the result belongs to another step.
        """
        if result.step_id != plan.step_id:
            raise RuntimeError(f"result of step {result.step_id} applied to step {plan.step_id}")
        self.events.now_s = now_s
        batch, running = self.batch, State.RUNNING
        progressed = []
        nobody = (None, None)
        for row, (tokens, logprobs) in zip(plan.rows, result.outputs, strict=True):
            request, sequence = batch.by_sequence.get(row.sequence_id, nobody)
            if not tokens or request is None or sequence is None or request.state is not running:
                continue
            token = tokens[0]
            progressed.append(request)
            if token < 0:
                message = f"request {request.request_id}: the model's logits are not finite"
                batch.finish(request, FinishReason.ERROR, error=message)
                continue
            sequence.token_ids.append(token)
            request.token_times_s.append(now_s)
            if logprobs:
                request.logprobs.extend(logprobs)
            if token in request.stop_ids and request.num_output_tokens > request.params.min_tokens:
                eos = token not in request.params.stop_token_ids
                batch.finish(request, FinishReason.STOP, stop_reason=None if eos else token)
            elif len(sequence.token_ids) >= request.max_known_tokens:
                stop = find_stop(request)
                reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
                batch.finish(request, reason, stop_reason=stop)
        return progressed

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
        head = next(iter(batch.waiting), None)
        if head is None or batch.finished:
            return
        message = (
            f"request {head.request_id} cannot be scheduled: nothing else runs, and its "
            f"{head.num_remaining_tokens} tokens do not enter with "
            f"{batch.pool.num_free} free blocks of {self.limits.block_size} tokens and a budget of "
            f"{self.limits.max_num_batched_tokens} tokens per step"
        )
        batch.finish(head, FinishReason.ERROR, error=message)
