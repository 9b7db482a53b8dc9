"""A compact recording says what a full one says, and keeps nothing else.

Random workloads under random policies are served twice. Every figure of the summary is the same,
but for percentiles of gaps between tokens, which a histogram gives within its stated error.
"""

import pytest
from axes import policies
from builders import make_limits, make_policies, with_room
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from simulated_runs import arrivals_of, simulated

from paxserve.folded import FoldedRequests
from paxserve.histogram import RELATIVE_ERROR
from paxserve.metrics import LISTS, request_columns, scalars_of, summarize_columns
from paxserve.prefix_cache.none import NoCache
from paxserve.sampling_params import SamplingParams
from paxserve.serve import serve
from paxserve.workload.sources.listed import Listed

MAX_MODEL_LEN = 48
AXES = ("admission", "batching", "reservation", "placement", "prefix_cache", "preemption")
IS_BY_HISTOGRAM = ("median_itl_ms", "p50_itl_ms", "p90_itl_ms", "p99_itl_ms")


def summary_of(engine):
    engine.fold()
    engine.ledger.settle()
    folded = engine.folded
    requests = request_columns(engine.requests) if folded is None else folded.columns()
    return summarize_columns(requests, engine.steps, engine.ledger.columns())


def assert_same_figures(compact, full):
    assert compact.keys() == full.keys()
    for name, value in full.items():
        if name in IS_BY_HISTOGRAM and value is not None:
            assert compact[name] == pytest.approx(value, rel=RELATIVE_ERROR, abs=1e-12)
        else:
            assert compact[name] == value, name


def assert_same_run(compact, full):
    assert_same_figures(summary_of(compact), summary_of(full))
    assert compact.steps == full.steps
    assert compact.ledger.steps() == full.ledger.steps()
    rows = [scalars_of(request)._asdict() for request in full.requests]
    for row in rows:
        for name in LISTS:
            del row[name]
    assert compact.folded.table().to_pylist() == rows
    assert len(compact.events) == len(full.events)


def assert_nothing_kept(engine):
    assert len(list(engine.events)) <= len(engine.events)
    assert engine._leaving == []
    assert engine._texts._texts == {}
    assert engine.ledger._promises == engine.ledger._most_computed == {}
    with pytest.raises(RuntimeError, match="record=compact: use record=full"):
        engine.requests  # noqa: B018


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 14),
        st.integers(0, 2),
        st.integers(1, 30),
        st.sampled_from([0.0, 0.05, 0.4, 6.0]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 1),
    ),
    max_size=8,
)


@st.composite
def choices(draw):
    chosen = {axis: draw(st.sampled_from(policies(axis)), label=axis) for axis in AXES}
    if chosen["placement"].contiguous:
        chosen["prefix_cache"] = NoCache()
    return chosen


@given(
    chosen=choices(),
    requests=REQUESTS,
    rows=st.integers(1, 5),
    num_blocks=st.integers(14, 60),
    num_sequences=st.sampled_from([1, 1, 1, 2]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
def test_full_and_compact_recordings_agree(chosen, requests, rows, num_blocks, num_sequences):
    limits = make_limits(
        max_num_seqs=max(rows, num_sequences),
        max_model_len=MAX_MODEL_LEN,
        num_blocks=num_blocks,
        num_host_blocks=10,
    )
    limits = with_room(chosen["placement"], limits)
    try:
        make_policies(**chosen).check(limits)
    except ValueError:
        assume(False)
    params = SamplingParams(temperature=float(num_sequences > 1), n=num_sequences)
    engines = []
    for folded in (FoldedRequests(), None):
        engine = simulated(limits, [], folded=folded, **chosen)
        refused = serve(engine, Listed(arrivals_of(requests)), params)
        engines.append(engine)
        event(f"refused: {bool(refused)}")
    assert_same_run(*engines)
    assert_nothing_kept(engines[0])


def test_aborted_and_discarded_requests_are_folded_like_others():
    engines = []
    for folded in (FoldedRequests(), None):
        engine = simulated(make_limits(), [], folded=folded)
        params = SamplingParams(temperature=0.0, max_tokens=12)
        served = [engine.submit({"prompt_token_ids": [1 + i, 2]}, params) for i in range(6)]
        for _ in range(3):
            engine.step()
        assert engine.abort(served[0].request_id)
        engine.discard(served[1])
        engine.let_go(served[2])
        assert engine.abort(served[5].request_id)  # it waits
        while engine.has_work:
            engine.step()
        engine.scheduler.fail_all("nothing is left to fail", now_s=0.0)
        engines.append(engine)
    assert_same_run(*engines)
    assert_nothing_kept(engines[0])
    reasons = [row["finish_reason"] for row in engines[0].folded.table().to_pylist()]
    assert reasons == ["abort", "abort", "abort", "length", "length", "abort"]


def test_a_step_that_fails_ends_up_in_the_figures(monkeypatch):
    """Each error is counted, and the first are quoted."""
    monkeypatch.setattr("paxserve.folded.MOST_ERRORS", 4)
    engines = []
    for folded in (FoldedRequests(), None):
        engine = simulated(make_limits(), [], folded=folded)
        params = SamplingParams(temperature=0.0, max_tokens=12)
        for i in range(6):
            engine.submit({"prompt_token_ids": [1 + i, 2]}, params)
        engine.step()
        engine.executor.submit = None
        with pytest.raises(TypeError):
            engine.step()
        del engine.executor.submit
        engine.submit({"prompt_token_ids": [3, 4]}, params)
        while engine.has_work:
            engine.step()
        engines.append(engine)
    assert_same_run(*engines)
    assert_nothing_kept(engines[0])
    folded = engines[0].folded
    assert (folded.num_errors, len(folded.errors)) == (6, 4)
    assert "TypeError" in folded.errors[0]
