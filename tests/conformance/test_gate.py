"""Every gate answers from what it sees, and lets a request in that stands alone."""

import copy

import pytest
from axes import name_of, policies
from builders import make_engine, make_limits, make_request, prompt_ids, run_to_end, submit
from invariants import check_idle

from paxserve.gate import MemoryView


def pytest_generate_tests(metafunc):
    gates = policies("gate")
    if "gate" in metafunc.fixturenames and gates:
        metafunc.parametrize("gate", gates, ids=[name_of(gate) for gate in gates])


@pytest.fixture
def gate():
    pytest.skip("there is no gate yet")


def test_a_gate_is_pure_and_never_refuses_more_memory(gate):
    request = make_request(6)
    before = copy.deepcopy(request.sequences)
    for needed in range(1, 9):
        answers = [gate.refusal(None, request, MemoryView(16, free, needed)) for free in range(17)]
        again = [gate.refusal(None, request, MemoryView(16, free, needed)) for free in range(17)]
        assert answers == again
        admits = [answer is None for answer in answers]
        assert admits == sorted(admits)
    assert request.sequences == before


def test_every_request_still_ends_behind_a_gate(gate):
    engine = make_engine(make_limits(block_size=2, num_blocks=12), gates=(gate,))
    for salt in range(6):
        submit(engine, prompt_ids(2 + salt, salt), max_tokens=4)
    run_to_end(engine)
    check_idle(engine)
