"""Every gate answers from what it sees, and lets a request in that stands alone."""

import copy
from dataclasses import fields, replace

import pytest
from axes import name_of, policies
from builders import (
    make_engine,
    make_limits,
    make_request,
    prompt_ids,
    run_to_end,
    submit,
    tokens_alone,
)
from invariants import check_idle

from paxserve.events import Kind
from paxserve.gate import LearningGate, MemoryView

per_gate = pytest.mark.parametrize("gate", policies("gate"), ids=name_of)
SMALL = make_limits(block_size=2, num_blocks=12, max_num_seqs=4, max_model_len=16)


def state_of(gate):
    return gate.init() if isinstance(gate, LearningGate) else None


@per_gate
def test_a_gate_is_pure_and_more_free_memory_never_closes_it(gate):
    request, running = make_request(6), (make_request(3), make_request(9))
    requests = (request, *running)
    before, state = [repr(r.sequences) for r in requests], state_of(gate)
    for needed in range(1, 9):
        views = [MemoryView(24, free, needed, needed + 1, 0, 4, running) for free in range(25)]
        answers = [gate.refusal(state, request, view) for view in views]
        assert answers == [gate.refusal(state, request, view) for view in views]
        admits = [answer is None for answer in answers]
        assert admits == sorted(admits)
        assert all(name_in(gate, answer) for answer in answers if answer is not None)
    assert [repr(r.sequences) for r in requests] == before
    assert state == state_of(gate)


def name_in(gate, answer):
    """A refusal opens with the file's name, as it stands in the log."""
    return answer.startswith(type(gate).__module__.rsplit(".", 1)[-1])


@per_gate
def test_who_stands_alone_enters(gate):
    for needed in range(1, 9):
        view = MemoryView(num_usable=8, num_free=needed, num_needed=needed, num_needed_for_all=8)
        assert gate.refusal(state_of(gate), make_request(8), view) is None


@per_gate
def test_behind_a_gate_every_request_ends_with_its_tokens_and_the_state_replays(gate):
    engine = make_engine(SMALL, gates=(gate,))
    gates = engine.scheduler.batch.gates
    seen, tell = [], gates.tell

    def listening(what):
        tell(what)
        seen.append((what, copy.deepcopy(gates._states)))

    gates.tell = listening
    for salt in range(6):
        submit(engine, prompt_ids(2 + salt, salt), max_tokens=4 + salt)
    run_to_end(engine)
    check_idle(engine)
    for salt, request in enumerate(engine.requests):
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(2 + salt, salt), 4 + salt)
    state = state_of(gate)
    for what, states_then in seen:
        if isinstance(gate, LearningGate):
            state = gate.observe(state, what)
        assert [state] == states_then
    told = {what.kind for what, _ in seen}
    if isinstance(gate, LearningGate):
        assert told >= {Kind.ARRIVED, Kind.ENTERED, Kind.SERVED}
    else:
        assert not told


@per_gate
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "x", None, True])
def test_settings_that_mean_nothing_are_refused_by_name(gate, value):
    for field in fields(gate):
        with pytest.raises(ValueError, match=field.name):
            replace(gate, **{field.name: value})
