"""The loop, and nothing else: retire -> plan -> execute -> apply.

Owns: the order of things, and text of the requests that have any. In: requests. Out: which
requests got a token or ended, step by step; records for `metrics.py`. Must not know: policies,
devices, which kind of clock or executor it was given.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paxserve.block_log import BlockLog
from paxserve.clock import Clock
from paxserve.events import EventLog
from paxserve.executor import Executor, Repeating
from paxserve.intake import Intake, InvalidRequest, Prompt
from paxserve.leaping import Leaping
from paxserve.ledger import Ledger, SlotCounts
from paxserve.limits import Limits
from paxserve.models.tokenizer import Tokenizer
from paxserve.notices import Notices
from paxserve.outputs import Delta, RequestOutput, request_output
from paxserve.policies import Policies
from paxserve.records import StepLog, StepRecord
from paxserve.request import NO_ORIGIN, FinishReason, Origin, Request, State
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import Scheduler
from paxserve.texts import Texts

if TYPE_CHECKING:
    from paxserve.folded import FoldedRequests


class Engine:
    """One scheduler, one executor, one clock.

    `requests` are all that were ever accepted, in order of arrival; `steps` one record per
    executed step, beside `ledger.steps()`. These and `events` grow as long as the engine lives:
    they are what an experiment is for. `block_log` is None unless it is asked for. With `folded`,
    a request is reduced to its figures once it has ended and holds nothing, and events are dropped.
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
        logs_blocks: bool = False,
        folded: "FoldedRequests | None" = None,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.executor = executor
        self.folded = folded
        self.events = EventLog(keeps=folded is None)
        self.scheduler = Scheduler(limits=limits, policies=policies, events=self.events)
        self.ledger = Ledger(self.scheduler.batch)
        self.block_log = BlockLog(self.scheduler.batch) if logs_blocks else None
        self._requests: list[Request] = []
        self._leaving: list[Request] = []  # ended, but perhaps not released
        self.steps = StepLog()
        self._intake = intake
        self._notices = notices
        self._texts = Texts(tokenizer)
        self._leaping: Leaping | None = None
        if isinstance(executor, Repeating) and tokenizer is None and not logs_blocks:
            self._leaping = Leaping(
                scheduler=self.scheduler,
                executor=executor,
                ledger=self.ledger,
                steps=self.steps,
                clock=clock,
            )
        self._is_deciding = False
        self._let_go: list[Request] = []

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival_s: float | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> Request:
        """A request arrives.

        Args:
            prompt: text or token ids.
            params: how to sample and when to stop.
            request_id: used once, since results and seeds go by it; default: a number.
            arrival_s: when it arrived on the engine's clock; default: now.
            origin: who asks, and what is known of the request from outside.

        Raises:
            InvalidRequest: it cannot be served; the engine is as before, but for an event.
        """
        now_s = self.clock.now_s()
        try:
            request = self._intake.make(
                prompt,
                params,
                arrival_s=now_s if arrival_s is None else arrival_s,
                request_id=request_id,
                origin=origin,
            )
            self._check_policies_serve(request)
        except InvalidRequest as error:
            self.scheduler.reject(request_id or "?", reason=str(error), now_s=now_s)
            raise
        self.scheduler.add(request, now_s=now_s)
        if self.folded is None:
            self._requests.append(request)
        return request

    @property
    def requests(self) -> list[Request]:
        """All that were ever accepted, in order of arrival.

        Raises:
            RuntimeError: they were not kept.
        """
        if self.folded is not None:
            raise RuntimeError("requests are not kept under record=compact: use record=full")
        return self._requests

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if it is unknown or has ended.

        Raises:
            RuntimeError: a step is being decided, or its tokens dealt out: nobody may leave then.
        """
        if self._is_deciding:
            raise RuntimeError(f"request {request_id} cannot be aborted while a step is decided")
        request = self.scheduler.batch.requests.get(request_id)
        if request is None or request.state is State.FINISHED:
            return False
        self.scheduler.finish(request, FinishReason.ABORT, now_s=self.clock.now_s())
        self.scheduler.retire()
        self._end_texts(request)
        return True

    def discard(self, request: Request) -> None:
        """Abort a request, if it has not ended, without a word of it in the next step."""
        if request.finish_reason is None and self.abort(request.request_id):
            self.scheduler.batch.ended.remove(request)
            self._leaving.append(request)

    def let_go(self, request: Request) -> None:
        """Discard a request when the next step begins: for those who cannot know what is going on
        now, as a stream that is collected as garbage.
        """
        self._let_go.append(request)

    def output(self, request: Request) -> RequestOutput:
        """What a request has produced so far."""
        return request_output(request, [self._texts.text(s) for s in request.sequences])

    def fold(self) -> None:
        """Requests that have ended and hold nothing: what was counted for them is final."""
        held, leaving = self.scheduler.batch.requests, self._leaving
        self._leaving = [request for request in leaving if request.request_id in held]
        for request in leaving:
            if request.request_id not in held:
                self.ledger.close(request)
                if self.folded is not None:
                    self._texts.close(request)
                    self.folded.add(request)

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, or is yet to release its row and memory."""
        return self.scheduler.has_work

    # The loop.

    def step(self, *, alone_until_s: float | None = None) -> list[Request]:
        """One step; returns the requests that got a token or ended since the last one.

        With `alone_until_s` the caller says that nobody comes, goes or looks on before that time;
        then a simulation may take several steps in one move, if they are all alike (`leaping.py`).

        If anything fails in it (an interrupt, a device out of memory, a wrong policy), what was
        planned is lost: every live request ends with an error, memory is released, and the failure
        is raised. The engine then serves new requests.
        """
        while self._let_go:
            self.discard(self._let_go.pop())
        try:
            if alone_until_s is not None and (progressed := self._leap(alone_until_s)):
                return progressed
            progressed, slots = self._step()
        except BaseException as failure:
            error = f"the step failed: {type(failure).__name__}: {failure}"
            self.scheduler.fail_all(error, now_s=self.clock.now_s())
            self.executor.reset()
            raise
        if self._texts.are_read:
            for request in progressed:
                self._advance_text(request)
        ended = self.scheduler.take_ended()
        self._leaving += ended
        if ended:
            seen = set(progressed)
            ended = [request for request in ended if request not in seen]
            for request in ended:
                self._advance_text(request)
        if self._notices is not None and slots is not None:
            self._notices.after_step(self.steps[-1], slots, self.events)
        return progressed + ended

    def _leap(self, until_s: float) -> list[Request]:
        """Several steps in one move, if that is sure to be as good as one by one; else none."""
        leaping, notices = self._leaping, self._notices
        return [] if leaping is None else leaping.leap(until_s, notices)

    @property
    def num_leapt_steps(self) -> int:
        """Of all steps so far, those that were not planned one by one."""
        return 0 if self._leaping is None else self._leaping.num_steps

    def _step(self) -> tuple[list[Request], SlotCounts | None]:
        """Requests that got a token, and the slot counts, None when nothing was to be computed."""
        scheduler, clock, batch = self.scheduler, self.clock, self.scheduler.batch
        scheduler.retire()
        if self._leaving:
            self.fold()
        num_entered, num_hit = batch.num_entered_tokens, batch.num_hit_tokens
        num_evicted = batch.pool.num_evicted
        start_s = clock.now_s()
        with self._deciding():
            plan = scheduler.plan(now_s=start_s)
        if plan is None:
            return [], None
        self.executor.submit(plan)
        result = self.executor.collect()
        clock.spend(result.duration_s)
        slots = self.ledger.record(result.duration_s, plan)
        if self.block_log is not None:
            self.block_log.record(plan.step_id)
        record = StepRecord(
            step_id=plan.step_id,
            start_s=start_s,
            duration_s=result.duration_s,
            compile_s=result.compile_s,
            num_compiles=result.num_compiles,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            num_blocks=plan.num_blocks(self.limits.block_size),
            padded_rows=result.padded_rows,
            padded_tokens=result.padded_tokens,
            padded_blocks=result.padded_blocks,
            num_running=len(batch.running),
            num_held=len(batch.finished),
            num_waiting=len(batch.waiting),
            num_entered_tokens=batch.num_entered_tokens - num_entered,
            num_cached_tokens=batch.num_hit_tokens - num_hit,
            num_evicted=batch.pool.num_evicted - num_evicted,
            num_copied=len(plan.copies),
            num_swapped_out=len(plan.swap_out),
            num_swapped_in=len(plan.swap_in),
            swap_bytes=result.swap_bytes,
            num_used_blocks=batch.pool.num_held,
            num_shared_owners=self.ledger.num_shared_owners[-1],
            largest_free_run=self.ledger.largest_free_run,
            terms_s=result.terms_s,
        )
        self.steps.append(record)
        with self._deciding():
            progressed = scheduler.apply(
                plan, result, now_s=clock.now_s(), find_stop=self._texts.advance
            )
        return progressed, slots

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        self._is_deciding = True
        try:
            yield
        finally:
            self._is_deciding = False

    def __iter__(self) -> Iterator[Delta]:
        """Stream everything: run until nothing is left, yielding what each step adds."""
        while self.has_work:
            for request in self.step():
                for sequence in request.sequences:
                    if self._texts.has_news(request, sequence):
                        yield self._texts.delta(request, sequence)

    def stream(self, request: Request) -> "RequestStream":
        """Stream one request; others go on beside it."""
        return RequestStream(self, request)

    def next_delta(self, request: Request) -> Delta | None:
        """Step until there is news of the request; None when all of it has been told."""
        while True:
            for sequence in request.sequences:
                if self._texts.has_news(request, sequence):
                    return self._texts.delta(request, sequence)
            if request.finish_reason is not None:
                return None
            self.step()

    def _advance_text(self, request: Request) -> None:
        """Feed new tokens to the texts; a stop string found in one ends its sequence."""
        for sequence in list(request.live):
            stop = self._texts.advance(request, sequence)
            if stop is not None and sequence.finish_reason is None:
                self.scheduler.stop(request, sequence, stop, now_s=self.clock.now_s())
        self._end_texts(request)

    def _end_texts(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                self._texts.advance(request, sequence)

    def _check_policies_serve(self, request: Request) -> None:
        try:
            self.scheduler.policies.check_request(request, self.limits)
        except ValueError as error:
            self._intake.take_back(request.request_id)
            raise InvalidRequest(str(error)) from error


class RequestStream:
    """The deltas of one request. Letting go of it before its end aborts the request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        delta = self._engine.next_delta(self._request)
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Abort the request, if it has not ended."""
        self._engine.discard(self._request)

    def __del__(self) -> None:
        self._engine.let_go(self._request)
