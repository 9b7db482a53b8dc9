"""What a running request gives back when it makes way, in the step and for good."""

import pytest
from axes import name_of, policies
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit, tokens_alone
from invariants import check, check_idle

from paxserve.batching import Grant
from paxserve.batching.static import Static
from paxserve.intake import seed_of_sample
from paxserve.planning import StepInMaking
from paxserve.preemption import Method
from paxserve.preemption.recompute import Recompute
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.radix import Radix
from paxserve.request import FinishReason, State
from paxserve.reservation.on_demand import OnDemand
from paxserve.reservation.prompt import Prompt


def step_in_making(engine):
    scheduler = engine.scheduler
    return StepInMaking(batch=scheduler.batch, policies=scheduler.policies, events=engine.events)


def test_a_returned_grant_hides_the_blocks_it_was_to_fill_and_holds_back_who_found_them():
    for cache in (HashChain("planning"), Radix("planning")):
        engine = make_engine(make_limits(block_size=2), prefix_cache=cache)
        writer, reader, behind = (submit(engine, prompt_ids(n), max_tokens=2) for n in (5, 7, 9))
        other = submit(engine, prompt_ids(5, salt=1), max_tokens=2)
        step, batch = step_in_making(engine), engine.scheduler.batch
        verdicts = [step.answer(Grant(r, n)) for r, n in ((writer, 5), (reader, 3), (behind, 3))]
        assert [v.num_cached_tokens for v in verdicts] == [0, 4, 6]
        assert step.answer(Grant(other, 5)).num_tokens == 5
        assert step.budget_left == 64 - 5 - 3 - 3 - 5
        step.preempt([writer], "")
        assert [r.state for r in (writer, reader, behind)] == [State.WAITING] * 3
        assert step.budget_left == 64 - 5
        assert batch.pool.num_held == 3
        assert len(batch.pool.index) == 2  # those of the other
        plan = step.to_plan(1)
        assert [row.sequence_id for row in plan.rows] == [other.sequence.sequence_id]


def test_a_returned_grant_leaves_a_running_request_as_it_was_before_the_step():
    engine = make_engine(make_limits(block_size=2, num_host_blocks=8), preemption=Swap())
    request = submit(engine, prompt_ids(3), n=2, temperature=1.0, seed=1, max_tokens=4)
    engine.step()
    before = [(s.num_computed_tokens, s.num_known_tokens) for s in request.sequences]
    step = step_in_making(engine)
    assert step.answer(Grant(request, 2)).num_tokens == 2
    step.preempt([request], "")
    assert [(s.num_computed_tokens, s.num_known_tokens) for s in request.sequences] == before
    first, second = (s.host_blocks for s in request.sequences)
    assert first == second  # the copy that the step was to make is not made
    assert len(step.to_plan(2).swap_out) == len(first) == 2
    assert engine.scheduler.batch.pool.num_held == 0


def test_a_swapped_request_comes_back_with_its_content_and_computes_nothing_twice():
    engine = make_engine(make_limits(block_size=2, num_host_blocks=8), preemption=Swap())
    request = submit(engine, prompt_ids(5), n=2, temperature=1.0, seed=1, max_tokens=4)
    engine.step()
    engine.step()
    num_computed = [s.num_computed_tokens for s in request.sequences]
    engine.scheduler.preempt(request)
    engine.step()
    host_pool = engine.scheduler.batch.host_pool
    assert [s.num_computed_tokens for s in request.sequences] == num_computed == [6, 6]
    assert host_pool.num_free == 8 - 4  # two blocks in common, and one each
    engine.step()
    assert host_pool.num_free == 8
    plan = engine.executor.plans[-1]
    assert (len(plan.swap_in), [row.num_tokens for row in plan.rows]) == (4, [1, 1])
    run_to_end(engine)
    assert (request.num_lost_tokens, request.num_recomputed_tokens) == (0, 0)
    for i, sequence in enumerate(request.sequences):
        expected = tokens_alone(prompt_ids(5), 4, seed=seed_of_sample(1, i))
        assert request.output_of(sequence) == expected


def test_a_swap_that_the_host_cannot_hold_is_a_recompute_and_says_so():
    engine = make_engine(make_limits(block_size=2, num_host_blocks=2), preemption=Swap())
    request = submit(engine, prompt_ids(5), max_tokens=4)
    engine.step()
    engine.scheduler.preempt(request, why="for the test")
    engine.step()
    (event,) = [e for e in engine.events if e.kind == "preempted"]
    assert event.detail == "recompute, swap needs 3 host blocks, 2 are free, for the test"
    assert (event.num_tokens, request.sequence.host_blocks) == (5, [])


def test_a_preempted_request_takes_its_ended_samples_along():
    """Static batching keeps what has ended, but not of a request that leaves the batch."""
    params = {"n": 2, "temperature": 1.0, "max_tokens": 8, "seed": 2}
    limits = make_limits(block_size=2)
    engine = make_engine(limits, batching=Static(), vocab_size=9, eos_token_ids=[0])
    request = submit(engine, [1, 2, 3], **params)
    batch = engine.scheduler.batch
    while not batch.dead and engine.has_work:
        engine.step()
    assert request.state is State.RUNNING
    engine.scheduler.preempt(request)
    engine.scheduler.plan(now_s=9.0)
    assert request.state is State.WAITING
    assert (batch.dead, batch.pool.num_held, len(batch.free_rows)) == ([], 0, 4)
    check(engine)


def test_a_group_that_outgrows_the_pool_as_it_comes_back_leaves_no_host_block_behind():
    """Lost and swapped in turn: at last it comes back with a part, and the rest finds no room."""

    class InTurn:
        swaps = True

        def choose(self, request, victim):
            return Method.SWAP if request.num_preemptions % 2 else Method.RECOMPUTE

    limits = make_limits(
        block_size=2,
        num_blocks=7,
        max_model_len=8,
        max_num_batched_tokens=8,
        num_host_blocks=9,
    )
    engine = make_engine(limits, batching=Static(), preemption=InTurn())
    request = submit(engine, prompt_ids(5), n=4, temperature=1.0, seed=1)
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        if num_steps % 2 == 0 and request.state is State.RUNNING:
            engine.scheduler.preempt(request)
        engine.step()
        check(engine)
    check_idle(engine)
    assert request.finish_reason is FinishReason.ERROR
    assert request.num_preemptions == 4
    assert "outgrew the KV pool" in request.error


def test_tokens_are_lost_once_and_recomputed_when_it_comes_back_but_for_those_found():
    for cache, num_found in ((None, 0), (HashChain("after_step"), 4)):
        chosen = {"prefix_cache": cache} if cache else {}
        engine = make_engine(make_limits(block_size=2), preemption=Recompute(), **chosen)
        request = submit(engine, prompt_ids(5), max_tokens=4)
        engine.step()
        engine.scheduler.preempt(request)
        engine.scheduler.plan(now_s=1.0)
        assert (request.num_lost_tokens, request.num_recomputed_tokens) == (5, 0)
        run_to_end(engine)
        assert (request.num_lost_tokens, request.num_recomputed_tokens) == (0, 5 - num_found)
        assert request.num_hit_tokens == num_found


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
@pytest.mark.parametrize("reservation", [OnDemand(), Prompt()], ids=name_of)
def test_samples_come_back_alone_after_their_first_one_has_ended(batching, reservation):
    """What the first sequence of a request says is not what its live ones need."""
    limits = make_limits(block_size=2, num_host_blocks=9)
    for preemption in (Recompute(), Swap()):
        engine = make_engine(
            limits,
            batching=batching,
            reservation=reservation,
            preemption=preemption,
            vocab_size=9,
            eos_token_ids=[0],
        )
        request = submit(engine, [1, 2, 5], n=3, temperature=1.0, max_tokens=9, seed=25)
        mate = submit(engine, [4, 4], max_tokens=9, ignore_eos=True)
        while not request.sequences[0].finish_reason:
            engine.step()
        assert len(request.live) == 2
        for _ in range(2):
            if request.state is State.RUNNING:
                engine.scheduler.preempt(request)
            engine.step()
            check(engine)
        run_to_end(engine, max_steps=100)
        check_idle(engine)
        assert request.num_preemptions >= 1
        for i, sequence in enumerate(request.sequences):
            seed = seed_of_sample(25, i)
            tokens = tokens_alone([1, 2, 5], 9, seed=seed, vocab_size=9)
            end = tokens.index(0) + 1 if 0 in tokens else 9
            assert request.output_of(sequence) == tokens[:end]
        assert list(mate.output_token_ids) == tokens_alone([4, 4], 9, vocab_size=9)


def test_a_preemption_every_step_spares_who_has_not_sampled_so_that_all_come_to_their_end():
    """A prompt takes two steps."""
    limits = make_limits(block_size=2, max_num_batched_tokens=4, preempt_every_steps=1)
    engine = make_engine(limits)
    requests = [submit(engine, prompt_ids(5, salt), max_tokens=4) for salt in range(3)]
    run_to_end(engine, max_steps=60)
    for salt, request in enumerate(requests):
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(5, salt), 4)
    assert sum(request.num_preemptions for request in requests) >= 5
    forced = [e.detail for e in engine.events if e.kind == "preempted"]
    assert set(forced) == {"recompute, forced"}


def test_asking_for_a_preemption_preempts_once():
    engine = make_engine()
    request = submit(engine, prompt_ids(5), max_tokens=6)
    engine.step()
    engine.scheduler.preempt(request)
    run_to_end(engine)
    assert request.num_preemptions == 1
