"""Every admission and victim policy is a pure ranking, and every preemption a known method."""

import copy

import pytest
from axes import name_of, policies
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit, tokens_alone

from paxserve.admission.fcfs import Fcfs
from paxserve.events import Kind
from paxserve.preemption import Method
from paxserve.request import State
from paxserve.victim.newest import Newest

per_admission = pytest.mark.parametrize("admission", policies("admission"), ids=name_of)
per_victim = pytest.mark.parametrize("victim", policies("victim"), ids=name_of)
per_preemption = pytest.mark.parametrize("preemption", policies("preemption"), ids=name_of)
TIGHT = make_limits(block_size=2, num_blocks=8, max_num_seqs=3, max_model_len=12)


def overloaded(**chosen):
    """An engine in the middle of a run that preempts."""
    engine = make_engine(TIGHT, **chosen)
    for salt in range(6):
        submit(engine, prompt_ids(2 + salt % 3, salt), max_tokens=3 + salt)
    return engine


def check_tokens(engine):
    for salt, request in enumerate(engine.requests):
        expected = tokens_alone(prompt_ids(2 + salt % 3, salt), 3 + salt)
        assert list(request.output_token_ids) == expected


@per_admission
def test_admission_keys_are_pure_comparable_and_numbers(admission):
    engine = overloaded(admission=admission)
    state = admission.init()
    for _ in range(4):
        engine.step()
    before = copy.deepcopy(state)
    keys = [admission.key(state, request) for request in engine.requests]
    assert keys == [admission.key(state, request) for request in engine.requests]
    assert state == before
    assert all(isinstance(part, int | float) for key in keys for part in key)
    assert len({len(key) for key in keys}) == 1
    sorted(keys)


@per_admission
def test_admission_state_is_a_fold_that_replays_equal(admission):
    engine = overloaded(admission=admission)
    run_to_end(engine)
    check_tokens(engine)

    def replay():
        state = admission.init()
        for event in engine.events:
            state = admission.observe(state, event)
        return state

    assert replay() == replay()
    if admission.stateless:
        assert replay() == admission.init()


@per_admission
def test_the_queue_is_served_in_the_order_of_the_keys(admission):
    engine = make_engine(make_limits(max_num_seqs=1), admission=admission)
    requests = [submit(engine, prompt_ids(n), max_tokens=1) for n in (5, 2, 9, 3)]
    if admission.stateless:
        state = admission.init()
        expected = sorted(requests, key=lambda r: (admission.key(state, r), r.arrival_seq))
        assert list(engine.scheduler.batch.waiting) == expected
        run_to_end(engine)
        assert sorted(requests, key=lambda r: r.first_scheduled_s) == expected
    else:
        run_to_end(engine)
    assert all(r.num_output_tokens == 1 for r in requests)


def test_first_come_is_first_served():
    engine = make_engine(make_limits(max_num_seqs=1), admission=Fcfs())
    arrivals = [3.0, 1.0, 2.0, 1.0]
    requests = [submit(engine, prompt_ids(2), max_tokens=1, arrival_s=s) for s in arrivals]
    run_to_end(engine)
    assert sorted(requests, key=lambda r: r.first_scheduled_s) == [
        requests[1],
        requests[3],
        requests[2],
        requests[0],
    ]


@per_victim
def test_victim_keys_are_pure_comparable_and_rank_every_running_request(victim):
    engine = overloaded(victim=victim)
    engine.step()
    running = [r for r in engine.requests if r.state is State.RUNNING]
    assert len(running) >= 2
    keys = [victim.key(request) for request in running]
    assert keys == [victim.key(request) for request in running]
    assert len(set(keys)) == len(keys)  # no tie: the choice must not hang on the order of a list
    sorted(keys)


@per_victim
def test_whoever_is_preempted_every_request_ends_with_its_tokens(victim):
    engine = overloaded(victim=victim)
    run_to_end(engine)
    check_tokens(engine)
    assert sum(r.num_preemptions for r in engine.requests) > 0


def test_the_newest_admitted_is_preempted_first():
    limits = make_limits(block_size=2, num_blocks=7, max_num_seqs=3, max_model_len=12)
    engine = make_engine(limits, victim=Newest())
    requests = [submit(engine, prompt_ids(4, n), max_tokens=6) for n in range(3)]
    engine.step()
    engine.step()
    preempted = [e.request_id for e in engine.events if e.kind is Kind.PREEMPTED]
    assert preempted == [requests[2].request_id]
    run_to_end(engine)
    assert requests[0].num_preemptions == 0


@per_preemption
def test_a_method_is_one_the_scheduler_knows_and_its_choice_is_pure(preemption):
    engine = overloaded(preemption=preemption)
    engine.step()
    for request in engine.requests:
        method = preemption.choose(request)
        assert method in Method
        assert preemption.choose(request) is method


@per_preemption
def test_however_they_are_preempted_every_request_ends_with_its_tokens(preemption):
    engine = overloaded(preemption=preemption)
    run_to_end(engine)
    check_tokens(engine)
    preempted = [e for e in engine.events if e.kind is Kind.PREEMPTED]
    assert preempted
    assert {e.detail for e in preempted} <= {str(method) for method in Method}
