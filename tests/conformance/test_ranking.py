"""Every admission policy is a pure ranking."""

import copy

import pytest
from axes import name_of, policies
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit, tokens_alone

from paxserve.admission.fcfs import Fcfs

per_admission = pytest.mark.parametrize("admission", policies("admission"), ids=name_of)
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
