"""The loop, and nothing else: retire -> plan -> execute -> apply.

Owns: the order of things, and text of the requests that have any. In: requests. Out: which
requests got a token or ended, step by step; records for `metrics.py`. Must not know: policies,
devices, which kind of clock or executor it was given.
"""

from collections.abc import Iterator

from paxserve.clock import Clock
from paxserve.events import EventLog
from paxserve.executor import Executor
from paxserve.intake import Intake, InvalidRequest, Prompt
from paxserve.ledger import Ledger
from paxserve.limits import Limits
from paxserve.models.tokenizer import Tokenizer
from paxserve.notices import Notices
from paxserve.outputs import Delta, RequestOutput, request_output
from paxserve.policies import Policies
from paxserve.records import StepRecord
from paxserve.request import FinishReason, Request, State
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import Scheduler
from paxserve.texts import Texts


class Engine:
    """One scheduler, one executor, one clock.

    `requests` are all that were ever accepted, in order of arrival; `steps` one record per
    executed step, beside `ledger.steps()`.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        policies: Policies,
        executor: Executor,
        clock: Clock,
        intake: Intake,
        tokenizer: Tokenizer | None = None,
        notices: Notices | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.executor = executor
        self.events = EventLog()
        self.scheduler = Scheduler(limits=limits, policies=policies, events=self.events)
        self.ledger = Ledger(self.scheduler.batch)
        self.requests: list[Request] = []
        self.steps: list[StepRecord] = []
        self._intake = intake
        self._notices = notices
        self._texts = Texts(tokenizer)

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival_s: float | None = None,
    ) -> Request:
        """A request arrives.

        Args:
            prompt: text or token ids.
            params: how to sample and when to stop.
            request_id: default: a number.
            arrival_s: when it arrived on the engine's clock; default: now.

        Raises:
            InvalidRequest: it cannot be served; the engine is as before, but for an event.
        """
        now_s = self.clock.now_s()
        arrival_s = now_s if arrival_s is None else arrival_s
        try:
            request = self._intake.make(prompt, params, arrival_s=arrival_s, request_id=request_id)
            self.scheduler.add(request, now_s=now_s)
        except InvalidRequest as error:
            self.scheduler.reject(request_id or "?", reason=str(error), now_s=now_s)
            raise
        self.requests.append(request)
        self._texts.open(request)
        return request

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if it is unknown or has ended."""
        request = self.scheduler.batch.requests.get(request_id)
        if request is None or request.state is State.FINISHED:
            return False
        self.scheduler.finish(request, FinishReason.ABORT, now_s=self.clock.now_s())
        return True

    def output(self, request: Request) -> RequestOutput:
        """What a request has produced so far."""
        return request_output(request, self._texts.text(request))

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, or is yet to release its row and memory."""
        return self.scheduler.has_work

    # The loop.

    def step(self) -> list[Request]:
        """One step; returns the requests that got a token or ended since the last one."""
        scheduler, clock, batch = self.scheduler, self.clock, self.scheduler.batch
        scheduler.retire()
        start_s = clock.now_s()
        plan = scheduler.plan(now_s=start_s)
        progressed: list[Request] = []
        if plan is not None:
            slots = self.ledger.record()
            num_running, num_held = len(batch.running), len(batch.finished)
            self.executor.submit(plan)
            result = self.executor.collect()
            clock.spend(result.duration_s)
            progressed = scheduler.apply(plan, result, now_s=clock.now_s())
            record = StepRecord(
                step_id=plan.step_id,
                start_s=start_s,
                duration_s=result.duration_s,
                compile_s=result.compile_s,
                num_compiles=result.num_compiles,
                num_rows=len(plan.rows),
                num_tokens=plan.num_tokens,
                padded_rows=result.padded_rows,
                padded_tokens=result.padded_tokens,
                num_running=num_running,
                num_held=num_held,
                num_waiting=len(batch.waiting),
            )
            self.steps.append(record)
            if self._notices is not None:
                self._notices.after_step(record, slots, self.events)
        for request in progressed:
            self._advance_text(request)
        ended = [request for request in scheduler.take_ended() if request not in progressed]
        for request in ended:
            self._advance_text(request)
        return progressed + ended

    def __iter__(self) -> Iterator[Delta]:
        """Stream: run until nothing is left to do, yielding what each step adds."""
        while self.has_work:
            for request in self.step():
                yield self._texts.delta(request)

    def _advance_text(self, request: Request) -> None:
        """Feed new tokens; a stop string ends the request, even one that ended by length."""
        stop = self._texts.advance(request)
        if stop is None:
            return
        if request.state is State.RUNNING:
            now_s = self.clock.now_s()
            self.scheduler.finish(request, FinishReason.STOP, now_s=now_s, stop_reason=stop)
        elif request.finish_reason is FinishReason.LENGTH:
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop
