"""Leaping changes nothing: the same run with and without, under whatever policies go together.

Everything that a run leaves is compared: step records, slot classes, events, each request with its
tokens, their times and its slot-seconds, what was said, and the state of the pool. Costs grow with
rows and contexts, so that a step too many or too few shows in every later time.
"""

import dataclasses
import random

import pytest
from axes import combinations, name_of, policies
from builders import make_intake, make_limits, make_policies, prompt_ids, with_room
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from invariants import check_idle

from paxserve.admission import Learning, Reordering
from paxserve.clock import VirtualClock
from paxserve.cost_model import Costs
from paxserve.device.buckets import Exact
from paxserve.engine import Engine
from paxserve.executor.simulated import Simulated
from paxserve.gate import LearningGate
from paxserve.notices import Notices
from paxserve.prefix_cache.none import NoCache
from paxserve.request import Origin
from paxserve.sampling_params import SamplingParams
from paxserve.serve import serve
from paxserve.workload import Arrival
from paxserve.workload.sources.listed import Listed

MAX_MODEL_LEN, VOCAB_SIZE = 48, 40
AXES = ("admission", "reservation", "placement", "prefix_cache", "eviction", "victim", "preemption")


def costs():
    """A base, and some for each row and each token of context; none is a round number."""
    return Costs(
        ("base", "rows", "context"),
        lambda shape: (0.1, 0.003 * shape.num_rows, 0.0007 * shape.decode_context),
    )


class Recorded(Simulated):
    """Keeps its plans, by step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.plans = {}

    def submit(self, plan):
        self.plans[plan.step_id] = plan
        super().submit(plan)


def simulated(limits, said, *, leaps, cost_model=costs, **chosen):
    return Engine(
        limits=limits,
        policies=make_policies(**chosen),
        executor=Recorded(
            limits=limits,
            vocab_size=VOCAB_SIZE,
            costs=cost_model(),
            bytes_per_block=7,
            buckets=Exact(),
            leaps=leaps,
        ),
        clock=VirtualClock(),
        intake=make_intake(limits, vocab_size=VOCAB_SIZE),
        notices=Notices(status=None, warn=said.append),
    )


def arrivals_of(requests):
    """Of (prompt tokens, salt, output tokens, pause before it, client, priority)."""
    arrival_s = 0.0
    for number, (length, salt, output, pause_s, client, priority) in enumerate(requests):
        arrival_s += pause_s
        yield Arrival(
            request_id=str(number),
            arrival_s=arrival_s,
            prompt_token_ids=tuple(t % VOCAB_SIZE for t in prompt_ids(length, salt)),
            max_tokens=output,
            ignore_eos=True,
            origin=Origin(client=client, priority=priority, num_true_output_tokens=output),
        )


def state_of(engine, said):
    """All that a run leaves, in plain data."""
    engine.ledger.settle()
    batch, pool = engine.scheduler.batch, engine.scheduler.batch.pool
    requests = [
        {
            f.name: getattr(request, f.name)
            for f in dataclasses.fields(request)
            if f.name not in ("sequences", "live", "params", "sampling", "beams")
        }
        | {"sequences": [dataclasses.asdict(s) for s in request.sequences]}
        for request in engine.requests
    ]
    return {
        "steps": list(engine.steps),
        "slots": engine.ledger.steps(),
        "shared": list(engine.ledger.num_shared_owners),
        "events": list(engine.events),
        "now": (engine.clock.now_s(), engine.events.now_s, engine.events.step_id),
        "requests": requests,
        "said": said,
        "rows": sorted(batch.free_rows),
        "pool": (pool.cached, pool.num_evicted, pool.num_free, pool.num_held, pool.num_extra_refs),
        "hits": (batch.num_entered_tokens, batch.num_hit_tokens),
    }


def both(limits, requests, params=None, **chosen):
    """Served with and without leaping: the two states, and how many steps were leapt. Steps that
    were planned both times were planned alike.
    """
    states, plans = [], []
    for leaps in (True, False):
        said = []
        engine = simulated(limits, said, leaps=leaps, **chosen)
        params = params or SamplingParams(temperature=0.0)
        assert serve(engine, Listed(arrivals_of(requests)), params) == []
        check_idle(engine)
        states.append(state_of(engine, said))
        plans.append(engine.executor.plans)
        if leaps:
            num_leapt = engine.num_leapt_steps
        else:
            assert engine.num_leapt_steps == 0
    assert plans[0].items() <= plans[1].items()
    assert len(plans[0]) + num_leapt == len(plans[1])
    return states, num_leapt


def assert_same(states):
    ours, expected = states
    for name, value in expected.items():
        assert ours[name] == value, name


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 14),
        st.integers(0, 2),
        st.one_of(st.integers(1, 6), st.integers(10, 34)),
        st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.7, 6.0]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=7,
)


@st.composite
def sizes(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    rows, longest = draw(st.integers(1, 5)), -(-MAX_MODEL_LEN // block_size)
    return make_limits(
        block_size=block_size,
        max_num_seqs=rows,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=1 + draw(st.sampled_from([longest, longest + 2, 2 * longest, 9 * longest])),
        max_num_batched_tokens=draw(st.sampled_from([MAX_MODEL_LEN, MAX_MODEL_LEN + 7, 200])),
        num_host_blocks=draw(st.sampled_from([3, 40])),
        preempt_every_steps=draw(st.sampled_from([0, 0, 0, 0, 5])),
    )


def goes_together(limits, chosen):
    try:
        make_policies(**chosen).check(limits)
    except ValueError:
        return False
    return True


def is_steady(policy):
    return not isinstance(policy, Learning | LearningGate | Reordering)


@st.composite
def choices(draw):
    """One per axis; half of the time only such as do not learn."""
    may_learn = draw(st.booleans())

    def one_of(axis):
        found = [p for p in policies(axis) if may_learn or is_steady(p)]
        return st.sampled_from(found)

    chosen = {axis: draw(one_of(axis), label=axis) for axis in AXES}
    if chosen["placement"].contiguous:
        chosen["prefix_cache"] = NoCache()
    return chosen | {"gates": tuple(draw(st.lists(one_of("gate"), max_size=1 + may_learn)))}


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
@given(chosen=choices(), limits=sizes(), requests=REQUESTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_leap_leaves_everything_as_steps_one_by_one_do(batching, chosen, limits, requests):
    limits = with_room(chosen["placement"], limits)
    assume(goes_together(limits, chosen | {"batching": batching}))
    states, num_leapt = both(limits, requests, batching=batching, **chosen)
    assert_same(states)
    event(f"leapt: {num_leapt > 0}")
    event(f"leapt while somebody waited: {num_leapt > 0 and waited(states[0])}")


def waited(state):
    return any(record.num_waiting for record in state["steps"])


MEMORY = [
    param
    for param in combinations("reservation", "placement", "prefix_cache")
    if not (param.values[1].contiguous and param.values[2].shares)
]


@pytest.mark.parametrize(("reservation", "placement", "prefix_cache"), MEMORY)
def test_where_nobody_learns_most_steps_are_leapt(reservation, placement, prefix_cache):
    chosen = {"reservation": reservation, "placement": placement, "prefix_cache": prefix_cache}
    limits = with_room(placement, make_limits(num_blocks=60, max_model_len=MAX_MODEL_LEN))
    rng = random.Random(3)
    requests = [(rng.randint(2, 9), i % 2, rng.randint(20, 30), 0.3, "", 0) for i in range(8)]
    states, num_leapt = both(limits, requests, **chosen)
    assert_same(states)
    # A contiguous table that grows is asked for one step after the other.
    expected = 0.0 if placement.contiguous and reservation.grows else 0.5
    assert num_leapt >= expected * len(states[0]["steps"])
