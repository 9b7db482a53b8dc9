"""The Perfetto trace: its schema, its tracks, and that its durations are those of the tables."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace

import pandas as pd
import pytest
from builders import make_engine, prompt_ids, run_to_end, submit
from saved_runs import SHORT_OF_MEMORY, save, serve

from paxserve.batching.static import Static
from paxserve.report.perfetto import (
    COMPILES,
    ENGINE,
    PREEMPTIONS,
    REQUESTS,
    ROWS,
    STEPS,
    request_spans,
    trace_events,
    write_trace,
)


@pytest.fixture(params=["continuous", "static", "preempting", "aborted"])
def run(tmp_path, request):
    """Runs with chunks, dead rows, preemption, and requests that never entered."""
    path = tmp_path / request.param
    if request.param == "static":
        return serve(path, [1, 3, 2, 4], batching=Static())
    if request.param == "preempting":
        return serve(path, [5, 5, 3], sizes=SHORT_OF_MEMORY)
    if request.param == "continuous":
        sizes = {"max_num_batched_tokens": 4}
        return serve(path, [2, 3, 4], num_prompt_tokens=9, sizes=sizes, arrivals=[3.0, 3.5, 30.0])
    engine = make_engine()
    for i in range(6):
        submit(engine, prompt_ids(3, i), max_tokens=5)
    engine.step()
    engine.abort("0")
    engine.abort("5")  # it waits
    with pytest.raises(ValueError, match="max_model_len"):
        submit(engine, prompt_ids(100), max_tokens=5)
    run_to_end(engine)
    return save(engine, path)


def spans(events, pid):
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            found[event["tid"]].append(event)
    return found


def track_names(events, pid):
    return {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == pid
    }


def seconds(events, name=None):
    return sum(event["dur"] for event in events if name in (None, event["name"])) / 1e6


def test_every_event_follows_the_schema(run):
    for event in trace_events(run):
        assert event["ph"] in "XMiC"
        assert {"name", "ts", "pid", "tid", "args"} <= set(event)
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "C" or all(value >= 0 for value in event["args"].values())
    assert json.loads(json.dumps(trace_events(run), allow_nan=False)) == trace_events(run)


def test_spans_of_a_track_are_apart_or_nested(run):
    events = trace_events(run)
    for pid in (REQUESTS, ROWS, ENGINE):
        for track in spans(events, pid).values():
            open_until = []
            for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
                end = event["ts"] + event["dur"]
                while open_until and open_until[-1] <= event["ts"] + 1e-6:
                    open_until.pop()
                assert not open_until or end <= open_until[-1] + 1e-6, event
                open_until.append(end)


def test_each_request_row_and_step_has_its_track(run):
    events = trace_events(run)
    assert sorted(track_names(events, REQUESTS).values()) == sorted(run.requests["request_id"])
    num_rows = run.limit("max_num_seqs")
    assert list(track_names(events, ROWS).values()) == [f"row {i}" for i in range(num_rows)]
    assert set(spans(events, REQUESTS)) <= set(track_names(events, REQUESTS))
    assert set(spans(events, ROWS)) <= set(track_names(events, ROWS))
    assert len(spans(events, ENGINE)[STEPS]) == len(run.steps)


def test_durations_of_a_request_are_those_of_its_record(run):
    events = trace_events(run)
    names, tracks = track_names(events, REQUESTS), spans(events, REQUESTS)
    by_name = {names[tid]: track for tid, track in tracks.items()}
    for record in run.requests.itertuples():
        track = by_name[record.request_id]
        waited = next(event["dur"] for event in track if event["name"] == "waiting") / 1e6
        if record.queue_time_s >= 0:  # it entered
            assert waited == pytest.approx(record.queue_time_s)
        if record.finish_reason == "length":
            in_all = seconds(track, "waiting") + seconds(track, "running")
            assert in_all + seconds(track, "preempted") == pytest.approx(record.e2e_s)
        num_preempted = sum(event["name"] == "preempted" for event in track)
        assert num_preempted == record.num_preemptions


def test_rows_and_requests_tell_the_same_story(run):
    events = trace_events(run)
    running = sum(seconds(track, "running") for track in spans(events, REQUESTS).values())
    held = sum(seconds(track, "held") for track in spans(events, REQUESTS).values())
    rows = [event for track in spans(events, ROWS).values() for event in track]
    assert seconds(rows, "dead") == pytest.approx(held)
    assert seconds(rows) - seconds(rows, "dead") == pytest.approx(running + held)


def test_steps_and_counters_are_the_table(run):
    events = trace_events(run)
    steps = spans(events, ENGINE)[STEPS]
    assert seconds(steps) == pytest.approx(run.steps["duration_s"].sum())
    counters = [event for event in events if event["ph"] == "C"]
    live = [event["args"]["live"] for event in counters if event["name"] == "KV slots"]
    assert live == run.steps["slots_live"].tolist()
    waiting = [event["args"]["waiting"] for event in counters if event["name"] == "requests"]
    assert waiting == [*run.steps["num_waiting"], 0]
    preempted = [event for event in events if event["ph"] == "i" and event["tid"] == PREEMPTIONS]
    assert len(preempted) == run.summary["num_preemptions"]


def test_a_life_in_full(tmp_path):
    """Nine prompt tokens four at a time, beside a decode from the third step on."""
    sizes = {"max_num_batched_tokens": 4}
    run = serve(tmp_path / "run", [3], num_prompt_tokens=9, sizes=sizes)
    assert [span[:3] for span in request_spans(run)["0"]] == [
        ("waiting", 0.0, 0.0),
        ("running", 0.0, 5.0),
        ("chunk of 4", 0.0, 1.0),
        ("chunk of 4", 1.0, 2.0),
        ("decoding", 2.0, 5.0),
    ]


def test_times_count_from_the_first_arrival(tmp_path):
    run = serve(tmp_path / "run", [1, 1], arrivals=[100.0, 103.5])
    found = request_spans(run)
    assert [spans[0].start_s for spans in found.values()] == [0.0, 3.5]
    assert [spans[-1].end_s for spans in found.values()] == [1.0, 4.5]
    assert min(event["ts"] for event in trace_events(run) if event["ph"] == "C") == 0.0


def test_a_request_of_two_sequences_runs_once(tmp_path):
    run = serve(tmp_path / "run", [3])
    twice = run.decisions[run.decisions["kind"] == "entered"]
    log = pd.concat([run.decisions[:2], twice.assign(row=1), run.decisions[2:]])
    assert log["kind"].tolist()[:3] == ["arrived", "entered", "entered"]
    assert request_spans(replace(run, decisions=log)) == request_spans(run)
    assert [span.name for span in request_spans(run)["0"]].count("running") == 1


def test_compilations_lie_in_their_steps(tmp_path):
    run = serve(tmp_path / "run", [3])
    run.steps.loc[1, ["num_compiles", "compile_s"]] = (2, 0.25)
    (compiles,) = spans(trace_events(run), ENGINE)[COMPILES]
    assert (compiles["name"], compiles["ts"], compiles["dur"]) == ("2 compilations", 1e6, 0.25e6)


def test_the_file_is_json_compressed_or_not(run, tmp_path):
    number = write_trace(run, tmp_path / "trace.json")
    write_trace(run, tmp_path / "trace.json.gz")
    text = (tmp_path / "trace.json").read_text()
    assert len(json.loads(text)["traceEvents"]) == number == len(trace_events(run))
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode() == text
