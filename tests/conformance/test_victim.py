"""Every victim policy is a pure ranking without ties, and its order is the one it is named for."""

import dataclasses

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

from paxserve.events import Kind
from paxserve.request import Origin, Sequence, State
from paxserve.victim.fewest_computed import FewestComputed
from paxserve.victim.fewest_output import FewestOutput
from paxserve.victim.lowest_priority import LowestPriority
from paxserve.victim.most_blocks import MostBlocks
from paxserve.victim.newest import Newest

per_victim = pytest.mark.parametrize("victim", policies("victim"), ids=name_of)
TIGHT = make_limits(block_size=2, num_blocks=8, max_num_seqs=3, max_model_len=12)


def overloaded(**chosen):
    """An engine at the begin of a run that preempts."""
    engine = make_engine(TIGHT, **chosen)
    for salt in range(6):
        submit(engine, prompt_ids(2 + salt % 3, salt), max_tokens=3 + salt)
    return engine


@per_victim
def test_keys_are_pure_comparable_and_rank_every_running_request(victim):
    engine = overloaded(victim=victim)
    most_running = 0
    while engine.has_work:
        engine.step()
        running = [r for r in engine.requests if r.state is State.RUNNING]
        most_running = max(most_running, len(running))
        keys = [victim.key(request) for request in running]
        assert keys == [victim.key(request) for request in running]
        assert len(set(keys)) == len(keys)  # no tie: the choice must not hang on a list's order
        sorted(keys)
    assert most_running == 3


@per_victim
def test_whoever_is_preempted_every_request_ends_with_its_tokens(victim):
    engine = overloaded(victim=victim)
    run_to_end(engine)
    for salt, request in enumerate(engine.requests):
        expected = tokens_alone(prompt_ids(2 + salt % 3, salt), 3 + salt)
        assert list(request.output_token_ids) == expected
    assert sum(r.num_preemptions for r in engine.requests) > 0


def running(admitted_seq, *, prompt, output=0, computed=0, blocks=(), priority=0):
    """A running request; `computed` and `blocks` of one sequence, or lists of several."""
    several = computed if isinstance(computed, list) else [computed]
    tables = blocks if isinstance(blocks, list) else [blocks]
    request = make_request(prompt, origin=Origin(priority=priority))
    tokens = prompt_ids(prompt + output)
    request = dataclasses.replace(
        request,
        state=State.RUNNING,
        sequences=tuple(
            Sequence(
                sequence_id=i,
                token_ids=list(tokens),
                num_remaining_tokens=len(tokens) - num_computed,
                num_computed_tokens=num_computed,
                block_table=list(table),
            )
            for i, (num_computed, table) in enumerate(zip(several, tables, strict=True))
        ),
    )
    request.admitted_seq = admitted_seq
    return request


@pytest.mark.parametrize(
    ("victim", "order"),
    [
        (Newest(), [4, 3, 2, 1, 0]),
        (LowestPriority(), [2, 1, 4, 0, 3]),
        (FewestComputed(), [2, 1, 3, 0, 4]),
        (FewestOutput(), [4, 0, 1, 2, 3]),
        (MostBlocks(), [4, 1, 2, 0, 3]),
    ],
    ids=lambda value: name_of(value) if not isinstance(value, list) else "",
)
def test_the_order_in_which_five_requests_would_go(victim, order):
    """Each policy meets ties in what it looks at first; fewest output meets two in a row."""
    five = [
        running(0, prompt=8, output=3, computed=10, blocks=range(3), priority=0),
        running(1, prompt=4, output=3, computed=6, blocks=range(5), priority=2),
        running(2, prompt=8, output=5, computed=6, blocks=range(3), priority=2),
        running(3, prompt=2, output=9, computed=10, blocks=range(1), priority=-1),
        running(4, prompt=8, output=3, computed=12, blocks=range(5), priority=0),
    ]
    assert [r.admitted_seq for r in sorted(five, key=victim.key)] == order


def test_all_sequences_of_a_request_count_and_a_shared_block_once():
    pair = running(0, prompt=4, computed=[5, 5], blocks=[(1, 2, 3), (1, 2, 4)])
    single = running(1, prompt=4, computed=8, blocks=(5, 6, 7, 8, 9))
    assert FewestComputed().key(single) < FewestComputed().key(pair)  # 8 of 5 + 5
    assert MostBlocks().key(single) < MostBlocks().key(pair)  # 5, not 3 + 3
    assert MostBlocks().key(pair)[0] == -4


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


def test_a_priority_protects_the_newest_from_preemption():
    limits = make_limits(block_size=2, num_blocks=7, max_num_seqs=3, max_model_len=12)
    engine = make_engine(limits, victim=LowestPriority())
    requests = [
        submit(engine, prompt_ids(4, n), max_tokens=6, origin=Origin(priority=priority))
        for n, priority in enumerate([1, 2, 0])
    ]
    run_to_end(engine)
    preempted = [e.request_id for e in engine.events if e.kind is Kind.PREEMPTED]
    assert preempted[0] == requests[1].request_id
    assert requests[2].num_preemptions == 0
