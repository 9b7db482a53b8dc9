"""Leaping changes nothing: the same run with and without, under whatever policies go together.

Everything that a run leaves is compared: step records, slot classes, events, each request with its
tokens, their times and its slot-seconds, what was said, and the state of the pool. Costs grow with
rows and contexts, so that a step too many or too few shows in every later time.
"""

import dataclasses
import random
from dataclasses import dataclass

import pytest
from axes import combinations, name_of, policies
from builders import make_limits, make_policies, run_to_end, with_room
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from invariants import check_idle
from simulated_runs import VOCAB_SIZE, arrival, arrivals_of, simulated

from paxserve import leaping
from paxserve.admission import Learning, Reordering
from paxserve.batching.running_first import RunningFirst
from paxserve.events import Kind
from paxserve.gate import LearningGate
from paxserve.gate.watermark import Watermark
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.none import NoCache
from paxserve.reservation.on_demand import OnDemand
from paxserve.sampling_params import SamplingParams
from paxserve.serve import serve
from paxserve.workload.sources.listed import Listed

MAX_MODEL_LEN = 48
AXES = ("admission", "reservation", "placement", "prefix_cache", "eviction", "victim", "preemption")


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


def both(limits, requests, params=None, *, arrivals=None, **chosen):
    """Served with and without leaping: the two states, and how many steps were leapt. Steps that
    were planned both times were planned alike.
    """
    states, plans = [], []
    for leaps in (True, False):
        said = []
        engine = simulated(limits, said, leaps=leaps, **chosen)
        params = params or SamplingParams(temperature=0.0)
        assert serve(engine, Listed(arrivals or arrivals_of(requests)), params) == []
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
@given(
    chosen=choices(),
    limits=sizes(),
    requests=REQUESTS,
    most_steps=st.sampled_from([2, 256]),
    stop_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_leap_leaves_everything_as_steps_one_by_one_do(
    batching, chosen, limits, requests, most_steps, stop_ids
):
    limits = with_room(chosen["placement"], limits)
    assume(goes_together(limits, chosen | {"batching": batching}))
    params = SamplingParams(temperature=0.0, stop_token_ids=stop_ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaping, "MOST_STEPS", most_steps)
        states, num_leapt = both(limits, requests, params, batching=batching, **chosen)
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


def test_a_leap_goes_on_where_the_last_one_ended(monkeypatch):
    monkeypatch.setattr(leaping, "MOST_STEPS", 3)
    states, num_leapt = both(make_limits(), [(5, 0, 25, 0.0, "", 0), (2, 1, 20, 0.0, "", 0)])
    assert_same(states)
    assert num_leapt > 18


def test_an_end_token_is_never_leapt_over():
    """One counts once there are enough tokens, and a simulated sequence repeats its own."""
    requests = [(5, 0, 30, 0.0, "", 0), (6, 0, 30, 0.0, "", 0)]
    states, _ = both(make_limits(), requests)
    token = states[0]["requests"][0]["sequences"][0]["token_ids"][-1]
    params = SamplingParams(temperature=0.0, stop_token_ids=[token], min_tokens=10)
    stopped, num_leapt = both(make_limits(), requests, params)
    assert_same(stopped)
    ends = [r["sequences"][0] for r in stopped[0]["requests"]]
    assert [(end["finish_reason"], len(end["token_times_s"])) for end in ends] == [
        ("stop", 11),
        ("length", 26),
    ]
    assert num_leapt > 10


@pytest.mark.parametrize("publish", ["planning", "after_step"])
def test_who_comes_after_a_leap_finds_what_was_computed_in_it(publish):
    """In whatever step it comes."""
    cache, hits = HashChain(publish), set()
    alone, _ = both(make_limits(), [(5, 0, 24, 0.0, "", 0)])
    known = alone[0]["requests"][0]["sequences"][0]["token_ids"]
    for number in range(30):
        arrivals = [arrival(0, known[:5], 24), arrival(1, known, 2, arrival_s=0.11 * number)]
        states, num_leapt = both(make_limits(), (), arrivals=arrivals, prefix_cache=cache)
        assert_same(states)
        assert num_leapt > 3
        hits.add(states[0]["requests"][1]["num_hit_tokens"])
    assert hits >= {4, 8, 12, 16, 20, 24, 28}


def test_log_probabilities_are_asked_for_step_by_step():
    requests = [(5, 0, 20, 0.0, "", 0)]
    states, num_leapt = both(make_limits(), requests, SamplingParams(temperature=0.0, logprobs=2))
    assert_same(states)
    assert num_leapt == 0
    assert len(states[0]["requests"][0]["sequences"][0]["logprobs"]) == 20


def test_a_warning_is_given_in_the_step_that_it_is_about():
    """One row; its request fills the pool while another one waits for the row."""
    limits = make_limits(max_num_seqs=1, num_blocks=21, max_model_len=80, max_num_batched_tokens=80)
    states, num_leapt = both(limits, [(3, 0, 76, 0.0, "", 0), (3, 1, 5, 0.0, "", 0)])
    assert_same(states)
    assert num_leapt > 70
    (warning,) = states[0]["said"]
    assert "nearly full (KV 95% in blocks, 91% live)" in warning


def test_why_the_head_is_held_back_is_said_anew_where_the_numbers_change():
    """The gate sees fewer free blocks as the running request grows."""
    limits = make_limits(num_blocks=13)
    requests = [(4, 0, 24, 0.0, "", 0), (14, 1, 5, 0.0, "", 0)]
    states, _ = both(limits, requests, gates=(Watermark(share=0.8),))
    assert_same(states)
    said = {e.detail for e in states[0]["events"] if e.kind is Kind.HELD_BACK}
    assert len(said) > 4


def test_a_waiting_request_enters_as_soon_as_enough_of_it_is_cached():
    """Its prompt is what the running request is about to write, and it lacks one block until two of
    them are found.
    """
    limits = make_limits(num_blocks=9, max_model_len=32)
    alone, _ = both(limits, [(5, 0, 24, 0.0, "", 0)])
    known = alone[0]["requests"][0]["sequences"][0]["token_ids"]
    arrivals = [arrival(0, known[:5], 24), arrival(1, known, 3)]
    states, _ = both(limits, (), arrivals=arrivals, prefix_cache=HashChain())
    assert_same(states)
    first, second = states[0]["requests"]
    assert 0 < second["first_scheduled_s"] < first["finished_s"]
    entered = next(e for e in states[0]["events"] if e.kind is Kind.ENTERED and e.detail)
    assert (entered.request_id, entered.detail) == ("1", "8 cached")


@dataclass(frozen=True)
class Elders:
    """Who has produced ten tokens makes way for who has not."""

    displaces_running = True

    def key(self, state, request):
        return (request.num_output_tokens // 10,)


def test_who_will_be_displaced_is_not_leapt_past():
    limits = make_limits(max_num_seqs=1)
    requests = [(4, 0, 25, 0.0, "", 0), (4, 1, 25, 0.0, "", 0)]
    states, _ = both(limits, requests, admission=Elders())
    assert_same(states)
    assert [r["num_preemptions"] for r in states[0]["requests"]] == [1, 1]


@dataclass(frozen=True)
class Undeclared(RunningFirst):
    """Says nothing of what its proposals depend on."""

    is_steady = False


@dataclass(frozen=True)
class Generous(OnDemand):
    """Promises a block more than is needed."""

    is_exact = False

    def num_tokens(self, request, *, num_needed, limits):
        return num_needed + limits.block_size


@pytest.mark.parametrize("chosen", [{"batching": Undeclared()}, {"reservation": Generous()}])
def test_policies_that_declare_nothing_are_asked_in_every_step(chosen):
    states, num_leapt = both(make_limits(), [(4, 0, 20, 0.0, "", 0)], **chosen)
    assert_same(states)
    assert num_leapt == 0


def test_a_caller_that_looks_on_sees_every_step():
    said = []
    engine = simulated(make_limits(), said, leaps=True)
    engine.submit({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0.0, max_tokens=20))
    assert run_to_end(engine) == 21
    assert engine.num_leapt_steps == 0
