"""A simulated engine that is told the recorded step times decides what the real one did."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from builders import Dictated, make_limits, make_request
from fidelity_builders import CASES, POISSON, SIZES, TINY, make_bench
from real_builders import loaded

from paxserve.clock import VirtualClock
from paxserve.cost_model import Costs
from paxserve.device.buckets import Buckets
from paxserve.executor.simulated import Simulated
from paxserve.fidelity.comparing import EQUAL, figure_errors, likeness
from paxserve.fidelity.retold import Retold, recorded_costs, recorded_costs_and_gaps
from paxserve.results import write_results
from paxserve.step import BlockCopy, StepPlan

HAPPENS = {
    "conversations": ("prefix_hit_tokens",),
    "preempted": ("num_preemptions",),
    "swapped": ("swapped_out_blocks", "swap_bytes"),
    "short_of_memory": ("num_preemptions", "evicted_blocks"),
    "samples": ("copied_blocks",),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_step_times_give_every_decision_and_every_figure(case):
    bench = make_bench(CASES[case])
    real = bench.real()
    told = bench.retold(real)
    found = likeness(real, told)
    assert real.summary["completed"] == 24
    assert found.num_decisions > 96  # each request arrives, enters, ends, is released
    assert (found.num_different, found.first_difference) == (0, None)
    assert found.worst_error <= EQUAL, found.worst_figure
    assert found.is_equal
    assert told.engine.clock.num_told == len(real.engine.clock.readings_s)
    steps = real.engine.steps
    ends_s = [step.start_s + step.duration_s for step in steps]
    assert all(end_s < step.start_s for end_s, step in zip(ends_s, steps[1:], strict=False))
    for figure in HAPPENS.get(case, ()):
        assert real.summary[figure] > 0, figure
    outputs = [[run.engine.output(r).outputs for r in run.engine.requests] for run in (real, told)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("more", [(), ("limits.preempt_every_steps=5",)])
def test_a_virtual_clock_with_recorded_steps_and_gaps_ends_them_when_they_ended(more):
    """All requests are there at once: else one may come while the host is at work, and is seen a
    step earlier or later.
    """
    bench = make_bench((*TINY, "workload/arrivals=all_at_once", *more))
    real = bench.real()
    timed = bench.timed(real)
    assert isinstance(timed.engine.clock, VirtualClock)
    assert len(timed.engine.steps) == len(real.engine.steps) > 8
    came_s = min(request.arrival_s for request in real.engine.requests)
    for ours, theirs in zip(real.engine.steps, timed.engine.steps, strict=True):
        assert (theirs.num_rows, theirs.num_tokens) == (ours.num_rows, ours.num_tokens)
        ends_s = [step.start_s + step.duration_s for step in (ours, theirs)]
        assert ends_s[1] == pytest.approx(ends_s[0] - came_s, abs=1e-9)


def test_a_virtual_clock_without_the_gaps_is_early():
    bench = make_bench((*TINY, "workload/arrivals=all_at_once"))
    real = bench.real()
    bare = bench.simulated(recorded_costs(real.engine.steps), real)
    assert bare.summary["duration"] < bench.timed(real).summary["duration"]


def test_gaps_of_the_host_begin_where_a_step_ended_or_a_request_came():
    """Two requests; the second comes when the first has long ended. The clock starts at 0.5."""
    requests = [make_request(), make_request()]
    for request, (arrival_s, finished_s) in zip(requests, [(1.0, 4.1), (9.0, 12.1)], strict=True):
        request.arrival_s, request.finished_s = arrival_s, finished_s
    steps = [SimpleNamespace(start_s=s, duration_s=d)
             for s, d in ((1.5, 1.0), (2.75, 1.25), (9.25, 2.75))]  # fmt: skip
    costs = recorded_costs_and_gaps(steps, requests, start_s=0.5)
    told = [costs.of(None) for _ in range(4)]
    assert told[:3] == [(1.0, 0.5), (1.25, 0.25), (2.75, 0.25)]
    assert told[3] == pytest.approx((5 / 3, 1 / 3))


def test_the_files_of_both_runs_are_equal_row_by_row(tmp_path):
    bench = make_bench(CASES["preempted"])
    real = bench.real()
    for name, run in (("real", real), ("told", bench.retold(real))):
        (tmp_path / name).mkdir()
        write_results(run, tmp_path / name, config={})
    for table in ("decisions", "requests", "steps"):
        ours, theirs = (pq.read_table(tmp_path / d / f"{table}.parquet") for d in ("real", "told"))
        assert ours.num_rows >= 24
        assert ours.equals(theirs.select(ours.column_names)), table
    ours, theirs = (
        json.loads((tmp_path / d / "summary.json").read_text()) for d in ("real", "told")
    )
    assert max(figure_errors(ours, theirs).values()) <= EQUAL


def test_other_step_times_give_other_decisions():
    bench = make_bench(POISSON)
    real = bench.real()
    slow = bench.simulated(Costs(("slow",), lambda shape: (0.01,)), real)
    found = likeness(real, slow)
    assert found.num_different > 24
    assert found.first_difference is not None
    assert found.worst_error > 0.01
    assert not found.is_equal
    tokens = [[list(r.output_token_ids) for r in run.engine.requests] for run in (real, slow)]
    assert tokens[0] == tokens[1]  # what was said is told whatever the steps take


def test_a_run_that_asks_for_the_time_more_often_is_stopped():
    bench = make_bench(POISSON)
    real = bench.real()
    real.engine.clock.readings_s.pop()
    with pytest.raises(RuntimeError, match="it has decided otherwise"):
        bench.retold(real)


def test_a_beam_search_cannot_be_retold():
    beams = make_request(beam_width=2, max_tokens=4)
    with pytest.raises(ValueError, match=f"request {beams.request_id} is a beam search"):
        Retold(Dictated([]), [make_request(), beams])


def test_a_step_that_only_swaps_runs_no_shape_as_on_the_device():
    limits = make_limits()
    simulated = Simulated(
        limits=limits,
        vocab_size=9,
        costs=Costs(("blocks",), lambda shape: (float(shape.num_swapped),)),
        bytes_per_block=10,
        buckets=Buckets.for_limits(limits),
    )
    simulated.submit(StepPlan(1, (), swap_out=(BlockCopy(1, 0), BlockCopy(2, 1))))
    result = simulated.collect()
    assert (result.padded_tokens, result.padded_rows) == (0, 0)
    assert (result.duration_s, result.swap_bytes, result.outputs) == (2.0, 20, ())


def test_hardware_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"hardware=a100-80g is a gpu.*hardware=host-cpu"):
        make_bench([o for o in POISSON if o != "hardware=host-cpu"])
    with pytest.raises(ValueError, match="executor=scripted measures nothing"):
        make_bench((*POISSON, "executor=scripted"))


@pytest.mark.slow
def test_a_language_model_that_ends_by_itself_is_retold_too():
    loaded("smollm2-135m")  # or skip
    bench = make_bench((*SIZES[:2], "limits.max_model_len=512", "workload.limit=8",
                        "workload.arrival_scale=0.3"))  # fmt: skip
    real = bench.real()
    found = likeness(real, bench.retold(real))
    reasons = {str(request.finish_reason) for request in real.engine.requests}
    assert "stop" in reasons
    assert found.num_decisions > 32
    assert found.is_equal, found
