"""The scheduler checks its policies: a wrong answer is an error, never wrong memory."""

from dataclasses import dataclass, field

import pytest
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit, tokens_alone
from invariants import check

from paxserve.admission.priority import Priority
from paxserve.batching import Admit, Decodes, Grant, Reason
from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.textbook import Textbook
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.request import FinishReason, Origin, State


@dataclass
class Script:
    """A batching policy that proposes what a function makes of the view, and keeps the verdicts."""

    make: object
    release: str = "at_finish"
    whole_prompts: bool = False
    verdicts: list = field(default_factory=list)

    def propose(self, view):
        for proposal in self.make(view):
            verdict = yield proposal
            self.verdicts.append(verdict)


def scripted(make, limits=None, **chosen):
    policy = Script(make)
    return make_engine(limits or make_limits(), batching=policy, **chosen), policy


def everything(view):
    """A policy that works: each running request, then each waiting one, as far as they go."""
    yield from (Grant(r, r.num_remaining_tokens) for r in view.running)
    for request in view.waiting():
        yield Grant(request, request.num_remaining_tokens)


@pytest.mark.parametrize("num_tokens", [0, -1, 4])
def test_a_grant_outside_what_is_left_is_an_error(num_tokens):
    engine, _ = scripted(lambda view: [Grant(next(view.waiting()), num_tokens)])
    submit(engine, prompt_ids(3))
    with pytest.raises(RuntimeError, match=f"Script granted {num_tokens} tokens .*has 3 to comp"):
        engine.step()


def test_a_second_grant_in_one_step_is_an_error():
    def twice(view):
        (request,) = [*view.waiting(), *view.running]
        yield Grant(request, 2)
        yield Grant(request, 1)

    engine, _ = scripted(twice)
    submit(engine, prompt_ids(3))
    with pytest.raises(RuntimeError, match="granted in this step already: True"):
        engine.step()


def test_a_second_decode_in_one_step_is_an_error():
    def twice(view):
        if view.running:
            yield Decodes([*view.running, *view.running])
        else:
            yield from everything(view)

    engine, _ = scripted(twice)
    submit(engine, prompt_ids(3))
    engine.step()
    with pytest.raises(RuntimeError, match="granted in this step already: True"):
        engine.step()


def test_a_decode_of_a_prompt_is_an_error():
    def decode(view):
        yield Admit(next(view.waiting()), 3)
        yield Decodes(view.running)

    engine, _ = scripted(decode)
    submit(engine, prompt_ids(3))
    with pytest.raises(RuntimeError, match=r"granted 1 tokens .*has 3 to compute"):
        engine.step()


def test_admitting_without_computing_anything_is_an_error():
    engine, _ = scripted(lambda view: [Admit(next(view.waiting()), 3)])
    submit(engine, prompt_ids(3))
    with pytest.raises(RuntimeError, match=r"Script admitted \['0'\] but computes nothing"):
        engine.step()


def test_a_grant_to_a_request_that_is_over_is_an_error():
    kept = []

    def remember(view):
        if kept:
            yield Grant(kept[0], 1)
        else:
            kept.extend(view.waiting())
            yield Grant(kept[0], 3)

    engine, _ = scripted(remember)
    submit(engine, prompt_ids(3), max_tokens=1)
    engine.step()
    with pytest.raises(RuntimeError, match="which is finished"):
        engine.step()


def test_budget_rows_and_blocks_refuse_and_change_nothing():
    limits = make_limits(max_num_seqs=2, max_num_batched_tokens=10, num_blocks=4)
    engine, policy = scripted(everything, limits)
    lengths = [4, 7, 6, 6]
    for salt, length in enumerate(lengths):
        submit(engine, prompt_ids(length, salt), max_tokens=2)
    engine.scheduler.plan(now_s=0.0)
    refused = [verdict.refused for verdict in policy.verdicts]
    assert refused == [None, Reason.BUDGET, None, Reason.BUDGET]
    check_tables = [len(r.sequence.block_table) for r in engine.requests]
    assert check_tables == [1, 0, 2, 0]

    engine, policy = scripted(everything, make_limits(max_num_seqs=2))
    for salt in range(3):
        submit(engine, prompt_ids(4, salt))
    engine.scheduler.plan(now_s=0.0)
    assert [v.refused for v in policy.verdicts] == [None, None, Reason.ROWS]

    engine, policy = scripted(everything, make_limits(num_blocks=3))
    for salt in range(3):
        submit(engine, prompt_ids(5 if salt else 4, salt))
    engine.scheduler.plan(now_s=0.0)
    assert [v.refused for v in policy.verdicts] == [None, Reason.BLOCKS, Reason.BLOCKS]
    assert engine.scheduler.batch.pool.num_free == 1
    held_back = [e for e in engine.events if e.kind == "held_back"]
    assert [(e.request_id, e.num_tokens, e.detail) for e in held_back] == [("1", 5, "blocks")]


def test_a_gate_is_asked_with_the_memory_at_hand_and_can_refuse():
    asked = []

    class OneAtATime:
        def refusal(self, state, request, memory):
            asked.append((request.request_id, *memory[:3]))
            return None if memory.num_free == memory.num_usable else "not alone"

    engine, policy = scripted(everything, gates=(OneAtATime(),))
    for salt in range(2):
        submit(engine, prompt_ids(5, salt), max_tokens=1)
    engine.step()
    assert [v.refused for v in policy.verdicts] == [None, Reason.GATE]
    assert asked == [("0", 16, 16, 2), ("1", 16, 14, 2)]
    held_back = [e for e in engine.events if e.kind == "held_back"]
    assert [(e.request_id, e.detail) for e in held_back] == [("1", "gate: not alone")]
    run_to_end(engine)
    assert [r.num_output_tokens for r in engine.requests] == [1, 1]


def test_a_head_that_can_never_enter_is_ended_and_the_next_is_served():
    class Never:
        def refusal(self, state, request, memory):
            return "never" if request.request_id == "0" else None

    engine = make_engine(batching=ChunkedPrefill(), gates=(Never(),))
    stuck = submit(engine, prompt_ids(3))
    served = submit(engine, prompt_ids(3), max_tokens=2)
    run_to_end(engine, max_steps=10)
    assert stuck.finish_reason is FinishReason.ERROR
    assert "request 0 cannot be scheduled: nothing else runs" in stuck.error
    assert "16 free blocks of 4 tokens" in stuck.error
    assert served.num_output_tokens == 2


def test_kept_budget_is_left_for_others():
    limits = make_limits(max_num_batched_tokens=10)
    engine, policy = scripted(
        lambda view: [Grant(r, 4, num_kept=3) for r in view.waiting()], limits
    )
    for salt in range(3):
        submit(engine, prompt_ids(4, salt))
    engine.step()
    assert [v.refused for v in policy.verdicts] == [None, Reason.BUDGET, Reason.BUDGET]


def test_textbook_keeps_a_token_of_the_budget_for_each_running_request():
    """Budget 10 with 4 running: a newcomer of 6 enters beside them, one of 7 waits for one of
    them to end.
    """
    for length, entered in ((6, 2), (7, 4)):
        limits = make_limits(
            max_num_seqs=5, max_num_batched_tokens=10, max_model_len=10, num_blocks=40
        )
        engine = make_engine(limits, batching=Textbook())
        for salt in range(4):
            submit(engine, prompt_ids(2, salt), max_tokens=3)
        engine.step()
        newcomer = submit(engine, prompt_ids(length, 9), max_tokens=2)
        run_to_end(engine)
        assert newcomer.first_scheduled_s == entered - 1
        assert list(newcomer.output_token_ids) == tokens_alone(prompt_ids(length, 9), 2)
        assert all(r.sequence.token_times_s == [1.0, 2.0, 3.0] for r in engine.requests[:4])


def test_textbook_keeps_a_token_for_each_sequence_of_a_running_group():
    """Budget 10 and two samples under way: a newcomer of 8 enters beside them, one of 9 waits."""
    for length, entered_s in ((8, 1.0), (9, 3.0)):
        limits = make_limits(max_num_batched_tokens=10, max_model_len=10)
        engine = make_engine(limits, batching=Textbook())
        group = submit(engine, prompt_ids(2), n=2, temperature=1.0, max_tokens=3)
        engine.step()
        newcomer = submit(engine, prompt_ids(length, 9), max_tokens=1)
        run_to_end(engine)
        assert newcomer.first_scheduled_s == entered_s
        assert [s.token_times_s for s in group.sequences] == [[1.0, 2.0, 3.0]] * 2


def test_a_victim_s_grant_and_its_budget_come_back():
    """Pool of 4 blocks of 2. The newest has been granted its decode when the oldest, last in
    this policy's order, needs a block: the grant is returned and the budget with it.
    """
    budgets = []

    def newest_first(view):
        if not view.running:
            yield from everything(view)
            return
        yield Decodes(view.running[::-1])
        budgets.append(view.budget_left)

    limits = make_limits(
        block_size=2, num_blocks=5, max_num_seqs=2, max_num_batched_tokens=9, max_model_len=8
    )
    engine, policy = scripted(newest_first, limits)
    oldest = submit(engine, prompt_ids(4), max_tokens=4)
    newest = submit(engine, prompt_ids(3, 1), max_tokens=4)
    engine.step()
    plan = engine.scheduler.plan(now_s=1.0)
    assert [row.sequence_id for row in plan.rows] == [oldest.sequence.sequence_id]
    assert budgets == [8]
    assert policy.verdicts[-1].num_preempted == 1
    assert (newest.state, newest.num_preemptions) == (State.WAITING, 1)
    assert newest.num_lost_tokens == 3  # not the token of the grant it returned
    assert newest.sequence.num_known_tokens == len(newest.sequence.token_ids) == 4
    assert (newest.sequence.num_computed_tokens, newest.sequence.block_table) == (0, [])
    assert {write.row for write in plan.table_writes} == {oldest.sequence.row}


def test_nobody_enters_in_the_step_that_preempted_it():
    """Slots of 9: in step 4 the oldest, with 5, asks for one more, and the newest, with 4, loses
    all of its own. A chunk of it would fit into the 3 that are left, but not in this step.
    """
    limits = make_limits(
        block_size=1, num_blocks=10, max_num_seqs=2, max_num_batched_tokens=3, max_model_len=16
    )
    engine = make_engine(limits)
    submit(engine, prompt_ids(3), max_tokens=6)
    newest = submit(engine, prompt_ids(4, 1), max_tokens=3)
    for _ in range(4):
        assert newest.num_preemptions == 0
        engine.step()
    assert (newest.num_preemptions, newest.num_lost_tokens) == (1, 4)
    assert newest.state is State.WAITING
    assert engine.executor.plans[-1].entries == ()
    assert engine.scheduler.batch.pool.num_free == 3
    check(engine)
    engine.step()
    assert newest.state is State.RUNNING
    assert (newest.num_lost_tokens, newest.num_recomputed_tokens) == (0, 4)
    run_to_end(engine)
    assert list(newest.output_token_ids) == tokens_alone(prompt_ids(4, 1), 3)


def test_the_lowest_free_row_is_taken_and_kept():
    engine = make_engine(make_limits(max_num_seqs=3, num_blocks=40))
    first, second, third = (submit(engine, prompt_ids(2, n), max_tokens=9) for n in range(3))
    engine.step()
    assert [r.sequence.row for r in (first, second, third)] == [0, 1, 2]
    engine.abort(first.request_id)
    engine.abort(second.request_id)
    engine.step()
    late = submit(engine, prompt_ids(2, 5), max_tokens=2)
    engine.step()
    assert (late.sequence.row, third.sequence.row) == (0, 2)


def test_a_resumed_request_counts_as_newly_admitted():
    engine = make_engine()
    first = submit(engine, prompt_ids(3), max_tokens=9)
    second = submit(engine, prompt_ids(3, 1), max_tokens=9)
    engine.step()
    assert (first.admitted_seq, second.admitted_seq) == (0, 1)
    engine.scheduler.batch.preempt(first, num_lost_tokens=3, method="recompute")
    engine.step()
    assert (first.admitted_seq, second.admitted_seq) == (2, 1)
    assert first.first_scheduled_s == 0.0


def test_an_unknown_preemption_method_is_an_error():
    class Swap:
        swaps = False

        def choose(self, request, victim):
            return "swap"

    limits = make_limits(block_size=2, num_blocks=5, max_num_seqs=2, max_model_len=8)
    engine = make_engine(limits, preemption=Swap())
    submit(engine, prompt_ids(4), max_tokens=4)
    submit(engine, prompt_ids(3, 1), max_tokens=4)
    engine.step()
    with pytest.raises(RuntimeError, match="Swap answered 'swap', which is no preemption method"):
        engine.step()


def test_a_newcomer_that_does_not_fit_after_all_is_held_back_not_preempted():
    """Textbook admits before it grows: the old request's next block is the newcomer's."""
    engine = make_engine(make_limits(block_size=4, num_blocks=4), batching=Textbook())
    old = submit(engine, prompt_ids(4), max_tokens=3)
    engine.step()
    newcomer = submit(engine, prompt_ids(8, 1), max_tokens=2)
    engine.step()
    check(engine)
    assert (newcomer.state, newcomer.num_preemptions) == (State.WAITING, 0)
    assert newcomer.first_scheduled_s is None
    told = [(e.kind.value, e.detail) for e in engine.events if e.request_id == newcomer.request_id]
    assert told == [("arrived", ""), ("held_back", "blocks")]
    run_to_end(engine)
    assert list(old.output_token_ids) == tokens_alone(prompt_ids(4), 3)
    assert list(newcomer.output_token_ids) == tokens_alone(prompt_ids(8, 1), 2)


def test_a_policy_that_computes_nothing_while_requests_run_is_an_error():
    engine, _ = scripted(lambda view: [Grant(r, 3) for r in view.waiting()])
    submit(engine, prompt_ids(3))
    engine.step()
    with pytest.raises(RuntimeError, match="Script computes nothing though 1 requests run"):
        engine.step()


def test_a_decode_of_a_waiting_request_is_an_error():
    engine, _ = scripted(lambda view: [Decodes(list(view.waiting()))])
    submit(engine, prompt_ids(1))
    with pytest.raises(RuntimeError, match="which is waiting"):
        engine.step()


def test_a_policy_that_is_none_is_refused_at_the_start():
    with pytest.raises(ValueError, match="release must be at_finish or with_batch"):
        make_engine(batching=Script(None, release="at_finsh"))

    class Returns(Script):
        def propose(self, view):
            return []

    with pytest.raises(ValueError, match="propose must be a generator"):
        make_engine(batching=Returns(None))


# Displacement: in whose place a waiting request enters.


def displacing(limits, priorities, *, num_steps=1, **chosen):
    """An engine in which requests of these priorities run, and their order displaces."""
    engine = make_engine(limits, admission=Priority(displaces_running=True), **chosen)
    running = [
        submit(engine, prompt_ids(4, salt), max_tokens=8, origin=Origin(priority=priority))
        for salt, priority in enumerate(priorities)
    ]
    for _ in range(num_steps):
        engine.step()
    assert all(request.state is State.RUNNING for request in running)
    return engine, running


def displaced_in_a_step(engine, running):
    """Which of these, by number, a step displaces."""
    engine.step()
    return [i for i, request in enumerate(running) if request.num_preemptions]


@pytest.mark.parametrize(
    ("priority", "n", "displaced"),
    [(0, 1, [2]), (0, 2, [0, 2]), (0, 3, [0, 1, 2]), (2, 1, [2]), (2, 2, []), (3, 1, [])],
)
def test_the_last_in_rank_make_way_for_rows_and_nobody_in_vain(priority, n, displaced):
    engine, running = displacing(make_limits(max_num_seqs=3), [2, 1, 3])
    newcomer = submit(
        engine,
        prompt_ids(4, 9),
        n=n,
        temperature=float(n > 1),
        max_tokens=2,
        origin=Origin(priority=priority),
    )
    assert displaced_in_a_step(engine, running) == displaced
    assert (newcomer.state is State.RUNNING) == bool(displaced)
    run_to_end(engine)
    for salt, request in enumerate(running):
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(4, salt), 8)


@pytest.mark.parametrize(("priorities", "displaced"), [([1, 1, 1], [0, 1, 2]), ([0, 1, 1], [])])
def test_nobody_makes_way_for_more_blocks_than_all_would_free_and_asking_changes_nothing(
    priorities, displaced
):
    """Of 9 blocks two are cached, and each of three that run has two. The newcomer finds the two
    and needs six more, with one to write into for its second sample.
    """
    limits = make_limits(num_blocks=10)
    engine, _ = displacing(limits, [], prefix_cache=HashChain())
    submit(engine, prompt_ids(9, 7), max_tokens=1)
    run_to_end(engine)
    running = [
        submit(engine, prompt_ids(4, salt), max_tokens=8, origin=Origin(priority=priority))
        for salt, priority in enumerate(priorities)
    ]
    engine.step()
    engine.step()
    pool = engine.scheduler.batch.pool
    before = pool.num_free, pool.cached, pool.num_held
    assert before == (1, pool.cached, 6)
    prompt = [*prompt_ids(8, 7), *prompt_ids(22, 8)]
    newcomer = submit(engine, prompt, n=2, temperature=1.0, max_tokens=1, origin=Origin(priority=0))
    assert displaced_in_a_step(engine, running) == displaced
    if not displaced:
        assert newcomer.state is State.WAITING
        assert (pool.num_free, pool.cached, pool.num_held) == before
        for sequence in newcomer.sequences:
            assert (sequence.num_computed_tokens, sequence.num_remaining_tokens) == (0, 30)
            assert (sequence.source, sequence.block_table, sequence.row) == (None, [], -1)
    else:
        assert (newcomer.state, newcomer.num_cached_tokens) == (State.FINISHED, 8)
    run_to_end(engine)
    for salt, request in enumerate(running):
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(4, salt), 8)


def test_the_budget_of_those_who_make_way_is_the_newcomers():
    """Budget 6, of which three decodes take 3: a prompt of 5 needs those of two of them."""
    limits = make_limits(max_num_seqs=3, max_num_batched_tokens=6)
    policy = Script(everything)
    engine = make_engine(limits, batching=policy, admission=Priority(displaces_running=True))
    running = []
    for salt in range(3):
        request = submit(engine, prompt_ids(2, salt), max_tokens=9, origin=Origin(priority=1))
        running.append(request)
    engine.step()
    newcomer = submit(engine, prompt_ids(5, 9), max_tokens=2)
    assert displaced_in_a_step(engine, running) == [1, 2]
    assert engine.executor.plans[-1].num_tokens == 6
    run_to_end(engine)
    assert newcomer.sequence.token_times_s[0] == 2.0


def test_gates_are_asked_of_the_memory_as_it_will_be_without_those_who_make_way():
    seen = []

    class Watching:
        def refusal(self, state, request, memory):
            seen.append(memory)
            return "too many" if len(memory.running) > 1 else None

    engine = make_engine(
        make_limits(max_num_seqs=2),
        admission=Priority(displaces_running=True),
        gates=(Watching(),),
    )
    running = [
        submit(engine, prompt_ids(4, salt), max_tokens=8, origin=Origin(priority=1 + salt))
        for salt in range(2)
    ]
    engine.step()
    newcomer = submit(engine, prompt_ids(6, 9), max_tokens=2)
    seen.clear()
    assert displaced_in_a_step(engine, running) == [1]
    asked, entered = seen
    assert asked == entered
    assert (entered.running, entered.num_free, entered.newcomers) == (
        (running[0],),
        14,
        frozenset(),
    )
    assert newcomer.state is State.RUNNING


@dataclass(frozen=True)
class AdmitsAhead:
    """Memory for all of a prompt, tokens one by one."""

    release = "at_finish"
    whole_prompts = False

    def propose(self, view):
        for request in view.running:
            yield Grant(request, 1)
        for request in view.waiting():
            verdict = yield Admit(request, request.num_remaining_tokens)
            if verdict.refused:
                break
            yield Grant(request, 1)


def test_memory_that_is_admitted_ahead_is_reserved_in_the_ledger():
    engine = make_engine(batching=AdmitsAhead())
    submit(engine, prompt_ids(11), max_tokens=4)
    run_to_end(engine)
    first = engine.ledger.steps()[0]
    assert (first.live, first.reserved_used, first.tail, first.rounding) == (1, 10, 1, 0)


def test_what_a_displaced_request_shares_with_the_urgent_one_is_not_counted_twice():
    """H would find two of L's three blocks; with L gone they are no free blocks beside that."""
    limits = make_limits(num_blocks=9, block_size=4, max_model_len=32, max_num_seqs=4)
    order = Priority(displaces_running=True)
    engine = make_engine(limits, admission=order, prefix_cache=HashChain())
    for name, length, salt, priority in (("K", 9, 9, 0), ("L", 9, 0, 5)):
        submit(
            engine,
            prompt_ids(length, salt),
            request_id=name,
            max_tokens=8,
            origin=Origin(priority=priority),
        )
    engine.step()
    submit(engine, prompt_ids(22), request_id="H", max_tokens=2, origin=Origin(priority=1))
    engine.step()
    assert all(request.num_preemptions == 0 for request in engine.requests)
    run_to_end(engine)
