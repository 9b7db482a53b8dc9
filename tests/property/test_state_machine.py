"""Requests come, run, are preempted, aborted and finished in any order: the invariants hold."""

from collections import Counter

import pytest
from axes import policies
from builders import (
    Checked,
    make_engine,
    make_limits,
    prompt_ids,
    run_to_end,
    submit,
    tokens_alone,
)
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from invariants import check, check_idle

from paxserve.events import Kind
from paxserve.intake import InvalidRequest
from paxserve.request import FinishReason, State

COVERED: Counter[str] = Counter()


class EngineMachine(RuleBasedStateMachine):
    """Beside the engine it keeps only what was asked for and what was ended from outside."""

    @initialize(data=st.data())
    def open(self, data):
        block_size = data.draw(st.sampled_from([1, 2, 4]))
        num_usable = data.draw(st.integers(3, 9))
        batchings = policies("batching")
        splitting = [batching for batching in batchings if not batching.whole_prompts]
        batching = data.draw(st.sampled_from([*batchings, *splitting]))
        reservation = data.draw(st.sampled_from(policies("reservation")))
        placement = data.draw(st.sampled_from(policies("placement")))
        self.room = block_size * longest_table(placement, num_usable + 1)
        beyond = block_size + 2 if reservation.grows else 0
        max_model_len = max(2, self.room + data.draw(st.integers(-3, beyond)))
        max_model_len = min(max_model_len, self.room + beyond)
        rows = data.draw(st.integers(1, 4))
        least = max(rows, max_model_len if batching.whole_prompts else 1)
        self.limits = make_limits(
            block_size=block_size,
            num_blocks=num_usable + 1,
            max_num_seqs=rows,
            max_model_len=max_model_len,
            max_num_batched_tokens=max(least, data.draw(st.sampled_from([rows, rows + 1, 12]))),
        )
        self.engine = make_engine(
            self.limits, batching=batching, reservation=reservation, placement=Checked(placement)
        )
        self.ended_by_hand = {}

    def live(self, *states):
        return [r for r in self.engine.requests if r.state in states]

    def pick(self, data, requests):
        return data.draw(st.sampled_from(sorted(requests, key=lambda r: r.arrival_seq)))

    @rule(
        multiple=st.sampled_from(
            ["none", "one", "short", "block", "over", "two", "pool", "pool + 1"]
        ),
        max_tokens=st.one_of(st.none(), st.integers(1, 9)),
    )
    def add(self, multiple, max_tokens):
        block_size, slots = self.limits.block_size, self.limits.num_usable_slots
        length = {
            "none": 0,
            "one": 1,
            "short": block_size - 1,
            "block": block_size,
            "over": block_size + 1,
            "two": 2 * block_size,
            "pool": slots,
            "pool + 1": slots + 1,
        }[multiple]
        token_ids = prompt_ids(length, salt=len(self.engine.requests) % 3)
        if length == 0 or length > slots or length >= self.limits.max_model_len:
            with pytest.raises(InvalidRequest):
                submit(self.engine, token_ids, max_tokens=max_tokens)
        else:
            submit(self.engine, token_ids, max_tokens=max_tokens)

    @rule(max_tokens=st.integers(1, 9))
    def begin_the_longest_prompt(self, max_tokens):
        """With a budget shorter than it, the step leaves it in the middle."""
        length = min(self.limits.num_usable_slots, self.limits.max_model_len - 1)
        submit(self.engine, prompt_ids(length, salt=3), max_tokens=max_tokens)
        self.engine.step()

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.engine.step()
            check(self.engine)

    @precondition(lambda self: self.live(State.WAITING))
    @rule(data=st.data())
    def abort_waiting(self, data):
        self.abort(self.pick(data, self.live(State.WAITING)))

    @precondition(lambda self: self.live(State.RUNNING))
    @rule(data=st.data())
    def abort_running(self, data):
        self.abort(self.pick(data, self.live(State.RUNNING)))

    def abort(self, request):
        COVERED[f"abort while {request.state}"] += 1
        if request.state is State.RUNNING and not request.num_output_tokens:
            COVERED["abort in the middle of a prompt"] += 1
        if request.state is State.WAITING and request.num_preemptions:
            COVERED["abort while preempted"] += 1
        assert self.engine.abort(request.request_id)
        self.ended_by_hand[request] = FinishReason.ABORT

    @rule(data=st.data())
    def abort_what_is_unknown_or_over(self, data):
        over = [r.request_id for r in self.live(State.FINISHED)]
        in_use = [r.request_id for r in self.live(State.WAITING, State.RUNNING)]
        request_id = data.draw(st.sampled_from(["never seen", *over]))
        if request_id not in in_use:
            num_events = len(self.engine.events)
            assert not self.engine.abort(request_id)
            assert len(self.engine.events) == num_events

    @precondition(lambda self: self.live(State.RUNNING))
    @rule(data=st.data())
    def finish(self, data):
        request = self.pick(data, self.live(State.RUNNING))
        now_s = self.engine.clock.now_s()
        self.engine.scheduler.finish(request, FinishReason.STOP, now_s=now_s, stop_reason="x")
        self.ended_by_hand[request] = FinishReason.STOP

    @precondition(lambda self: self.live(State.RUNNING))
    @rule(data=st.data(), count=st.integers(1, 3))
    def preempt(self, data, count):
        for _ in range(min(count, len(self.live(State.RUNNING)))):
            request = self.pick(data, self.live(State.RUNNING))
            if not request.num_output_tokens:
                COVERED["preempt during prefill"] += 1
            num_lost = request.sequence.num_computed_tokens
            self.engine.scheduler.batch.preempt(
                request, num_lost_tokens=num_lost, method="recompute"
            )

    @invariant()
    def all_invariants_hold(self):
        if not hasattr(self, "engine"):
            return
        check(self.engine)
        block_size = self.limits.block_size
        for request in self.engine.scheduler.batch.running:
            sequence = request.sequence
            if sequence.num_computed_tokens == len(sequence.block_table) * block_size > 0:
                COVERED["last block exactly full"] += 1

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        bound = 10 + sum(
            2 * self.limits.max_model_len + 4 for r in self.live(State.WAITING, State.RUNNING)
        )
        run_to_end(self.engine, max_steps=bound)
        check_idle(self.engine)
        for request in self.engine.requests:
            self.check_outcome(request)
        count_events(self.engine)

    def check_outcome(self, request):
        room, num_prompt = self.room, request.num_prompt_tokens
        asked = request.params.max_tokens or self.limits.max_model_len
        num_tokens = min(asked, self.limits.max_model_len - num_prompt)
        expected = tokens_alone(request.prompt_token_ids, num_tokens)
        got = list(request.output_token_ids)
        assert len(got) == len(request.token_times_s)
        assert request.token_times_s == sorted(request.token_times_s)
        if request in self.ended_by_hand:
            assert request.finish_reason is self.ended_by_hand[request]
            assert got == expected[: len(got)]
        elif num_prompt + num_tokens - 1 <= room:
            assert request.finish_reason is FinishReason.LENGTH
            assert got == expected
        else:
            assert request.finish_reason is FinishReason.ERROR
            assert got == expected[: max(0, room - num_prompt + 1)]
            # Preempted with more known tokens than there is room for, it cannot resume; nor enter,
            # where the room is smaller than the pool.
            may_be_stuck = request.num_preemptions or num_prompt > room
            stuck = may_be_stuck and "cannot be scheduled" in request.error
            assert stuck or "outgrew the KV pool" in request.error
            COVERED["outgrew the pool"] += 1


def longest_table(placement, num_blocks):
    """Blocks of the longest table that an empty pool has a place for."""
    lengths = range(1, num_blocks)
    return max(n for n in lengths if placement.open(num_blocks).take(n) is not None)


def count_events(engine):
    events = list(engine.events)
    finished = [e.request_id for e in events if e.kind is Kind.FINISHED]
    assert sorted(finished) == sorted(r.request_id for r in engine.requests)
    num_preempted = sum(e.kind is Kind.PREEMPTED for e in events)
    assert num_preempted == sum(r.num_preemptions for r in engine.requests)
    entered = [e.request_id for e in events if e.kind is Kind.ENTERED]
    for request in engine.requests:
        assert entered.count(request.request_id) in (
            request.num_preemptions,
            request.num_preemptions + 1,
        )
    COVERED["preempted by a shortage"] += num_preempted
    event(f"preemptions: {min(num_preempted, 3)}")
    space = engine.scheduler.batch.pool.free_space
    COVERED["refused by the placement"] += space.num_refused


def test_engine_under_any_sequence_of_events():
    COVERED.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=400,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what in (
        "abort while waiting",
        "abort while running",
        "abort in the middle of a prompt",
        "abort while preempted",
        "preempt during prefill",
        "preempted by a shortage",
        "refused by the placement",
        "last block exactly full",
        "outgrew the pool",
    ):
        assert COVERED[what] >= 3, f"the machine hardly ever does this: {what}, {COVERED}"
