"""Figures of requests and runs, worked by hand."""

import math

import pytest
from builders import make_engine, make_limits, make_request, prompt_ids, run_to_end, submit

from paxserve.ledger import SlotCounts
from paxserve.metrics import request_record, slot_shares, summarize
from paxserve.records import StepRecord
from paxserve.request import FinishReason


def served(arrival_s, times, *, scheduled_s=None, reason=FinishReason.LENGTH, num_prompt=3):
    request = make_request(num_prompt)
    request.arrival_s = arrival_s
    request.sequence.token_times_s = list(times)
    request.sequence.token_ids.extend(range(len(times)))
    request.first_scheduled_s = scheduled_s
    request.finish_reason = reason
    return request


def step(duration_s=1.0, start_s=0.0, **fields):
    zeros = dict.fromkeys(StepRecord._fields, 0) | {"terms_s": ()}
    return StepRecord(**(zeros | {"start_s": start_s, "duration_s": duration_s} | fields))


def test_times_of_one_request():
    record = request_record(served(2.0, [5.0, 6.0, 8.0, 12.0], scheduled_s=3.0))
    assert record.queue_time_s == 1.0
    assert record.ttft_s == 3.0
    assert record.itl_s == (1.0, 2.0, 4.0)
    assert record.e2e_s == 10.0
    assert record.tpot_s == 7.0 / 3
    assert record.normalized_latency_s == 2.5
    assert record.ttft_s + sum(record.itl_s) == record.e2e_s
    assert (record.num_prompt_tokens, record.num_output_tokens) == (3, 4)
    assert record.output_token_ids == (0, 1, 2, 3)
    assert record.finish_reason == "length"


def test_one_token_has_no_time_per_output_token():
    record = request_record(served(1.0, [4.0], scheduled_s=1.0))
    assert (record.tpot_s, record.itl_s) == (None, ())
    assert (record.ttft_s, record.e2e_s, record.normalized_latency_s) == (3.0, 3.0, 3.0)


def test_a_request_without_tokens_has_no_times():
    record = request_record(served(1.0, [], reason=FinishReason.ABORT))
    assert record[5:11] == (1.0, None, None, None, None, None)
    assert (record.itl_s, record.num_output_tokens, record.finish_reason) == ((), 0, "abort")


def test_the_first_token_is_the_first_ever_in_spite_of_preemption():
    engine = make_engine()
    request = submit(engine, prompt_ids(4), max_tokens=5)
    for _ in range(3):
        engine.step()
    engine.scheduler.batch.preempt(request, num_lost_tokens=6, method="recompute")
    run_to_end(engine)
    record = request_record(request)
    assert (record.ttft_s, record.e2e_s) == (1.0, 5.0)
    assert record.itl_s == (1.0,) * 4
    assert (record.num_preemptions, record.num_recomputed_tokens) == (1, 6)
    assert record.num_prompt_tokens == 4  # recomputed tokens are no prompt tokens


def test_summary_of_a_run():
    requests = [
        served(0.0, [1.0, 2.0, 4.0], scheduled_s=0.0, num_prompt=5),
        served(1.0, [3.0], scheduled_s=2.0, num_prompt=2, reason=FinishReason.STOP),
        served(0.0, [], num_prompt=7, reason=FinishReason.ERROR),
        served(0.0, [2.0], scheduled_s=1.0, num_prompt=9, reason=FinishReason.ABORT),
    ]
    requests[0].num_preemptions, requests[0].num_recomputed_tokens = 2, 5
    steps = [
        step(
            2.0,
            num_rows=2,
            num_tokens=12,
            padded_rows=4,
            padded_tokens=16,
            num_running=2,
            compile_s=0.5,
            num_compiles=1,
        ),
        step(8.0, 2.0, num_rows=1, num_tokens=8, padded_rows=4, padded_tokens=16, num_running=1),
    ]
    slots = [SlotCounts(live=6, free=4, null=2), SlotCounts(live=1, tail=1, free=8, null=2)]
    summary = summarize(requests, steps, slots)
    assert summary["num_requests"] == 4
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert summary["duration"] == 10.0
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (7, 4)
    assert summary["output_tokens_of_others"] == 1
    assert summary["request_throughput"] == 0.2
    assert summary["output_throughput"] == 0.4
    assert summary["total_token_throughput"] == 1.1
    assert summary["mean_ttft_ms"] == summary["median_ttft_ms"] == 1000 * (1 + 2) / 2
    assert summary["mean_tpot_ms"] == 1500
    assert summary["mean_itl_ms"] == 1500
    assert summary["p99_itl_ms"] == pytest.approx(1990)
    assert summary["mean_e2el_ms"] == 1000 * (4 + 2) / 2
    assert summary["mean_queue_time_ms"] == 1000 * (0 + 1) / 2
    assert summary["mean_normalized_latency_s_per_token"] == pytest.approx((4 / 3 + 2) / 2)
    assert summary["mean_running_requests"] == pytest.approx((2 * 2 + 8 * 1) / 10)
    assert (summary["num_preemptions"], summary["recomputed_tokens"]) == (2, 5)
    assert summary["recomputed_share_of_computed_tokens"] == 5 / 20
    assert summary["kv_share_live"] == pytest.approx(0.2 * 0.6 + 0.8 * 0.1)
    assert summary["kv_share_tail"] == pytest.approx(0.8 * 0.1)
    assert summary["kv_share_free"] == pytest.approx(0.2 * 0.4 + 0.8 * 0.8)
    assert "kv_share_null" not in summary
    assert (summary["num_steps"], summary["computed_tokens"]) == (2, 20)
    assert summary["padded_token_share"] == 1 - 20 / 32
    assert summary["padded_row_share"] == 1 - 3 / 8
    assert (summary["num_compiles"], summary["compile_s"]) == (1, 0.5)
    assert summary["mean_step_time_ms"] == 5000


def test_a_run_of_nothing_has_undefined_figures_and_no_error():
    summary = summarize([], [], [])
    assert (summary["num_requests"], summary["completed"], summary["duration"]) == (0, 0, 0.0)
    for name in (
        "request_throughput",
        "output_throughput",
        "mean_ttft_ms",
        "p99_itl_ms",
        "mean_normalized_latency_s_per_token",
        "mean_running_requests",
        "padded_token_share",
        "recomputed_share_of_computed_tokens",
    ):
        assert summary[name] is None, name
    assert slot_shares([], []) == {}


def test_no_figure_of_a_real_run_is_nan_and_the_shares_make_one():
    engine = make_engine(make_limits(num_blocks=8))
    for salt in range(6):
        submit(engine, prompt_ids(3 + salt, salt), max_tokens=1 + salt)
    run_to_end(engine)
    summary = summarize(engine.requests, engine.steps, engine.ledger.steps())
    assert all(value is None or math.isfinite(value) for value in summary.values())
    shares = slot_shares(engine.steps, engine.ledger.steps())
    assert sum(shares.values()) == pytest.approx(1)
    assert summary["total_output_tokens"] == 21
    assert summary["completed"] == 6
    for request in engine.requests:
        record = request_record(request)
        assert record.ttft_s + sum(record.itl_s) == pytest.approx(record.e2e_s)
        assert record.num_output_tokens == len(record.output_token_ids)


def test_shares_of_steps_that_took_no_time_are_plain_means():
    slots = [SlotCounts(live=4, free=0, null=1), SlotCounts(live=0, free=4, null=1)]
    assert slot_shares([step(0.0), step(0.0)], slots)["live"] == 0.5


def test_several_sequences_count_each_in_its_own_time():
    request = make_request(3, n=2, temperature=1.0)
    request.arrival_s = 1.0
    for sequence, times in zip(request.sequences, ([4.0, 6.0, 8.0], [4.0, 5.0]), strict=True):
        sequence.token_times_s = times
        sequence.token_ids.extend(range(len(times)))
    record = request_record(request)
    assert (record.num_sequences, record.num_output_tokens) == (2, 5)
    assert (record.ttft_s, record.e2e_s) == (3.0, 7.0)
    assert record.itl_s == (2.0, 2.0, 1.0)
    assert record.tpot_s == (2.0 + 1.0) / 2
    assert record.normalized_latency_s == 7.0 / 2.5


def test_the_hit_rate_is_of_tokens_that_entered():
    steps = [step(num_entered_tokens=30, num_cached_tokens=16), step(num_entered_tokens=10)]
    summary = summarize([served(0.0, [1.0])], steps, [SlotCounts(free=8)] * 2)
    assert (summary["prefix_hit_tokens"], summary["prefix_hit_rate"]) == (16, 0.4)
    assert (
        summarize([served(0.0, [1.0])], [step()], [SlotCounts(free=8)])["prefix_hit_rate"] is None
    )
