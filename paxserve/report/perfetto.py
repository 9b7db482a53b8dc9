"""A saved run as a Perfetto trace (Chrome's trace event format, which ui.perfetto.dev opens).

Owns: which tracks there are, and the events on them. In: saved tables. Out: JSON events. Must not
know: policies.

| track | what lies on it |
|---|---|
| requests: one per request | waiting, running (inside: chunks, decoding), preempted, held |
| rows: one per row | the request in it; dead while it is finished and not released |
| engine: steps | each step with everything recorded of it |
| engine: compiles | compilations inside steps |
| engine: preemptions, decisions | who was preempted; who was refused, evicted, copied and why |
| counters | KV slots by class, requests running and waiting, tokens real and padded |

Times are microseconds since the first arrival.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from paxserve.events import Kind
from paxserve.report.run_tables import RunTables
from paxserve.report.timeline import timeline

type TraceEvent = dict[str, Any]

REQUESTS, ROWS, ENGINE = 1, 2, 3
STEPS, COMPILES, PREEMPTIONS, DECISIONS = 1, 2, 3, 4
_PROCESSES = {REQUESTS: "requests", ROWS: "rows", ENGINE: "engine"}
_ENGINE_TRACKS = {
    STEPS: "steps",
    COMPILES: "compiles",
    PREEMPTIONS: "preemptions",
    DECISIONS: "decisions",
}
_INSTANTS = (Kind.REJECTED, Kind.HELD_BACK, Kind.EVICTED, Kind.COPIED)


class Span(NamedTuple):
    """Something that lasts, in seconds since the first arrival."""

    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


def write_trace(run: RunTables, path: Path) -> int:
    """Write a trace, compressed if the name ends with .gz; returns the number of events."""
    events = trace_events(run)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return len(events)


def trace_events(run: RunTables) -> list[TraceEvent]:
    """All events of a run.

    Raises:
        MissingData: a table lacks a column.
    """
    return [*_names(run), *_request_tracks(run), *_row_tracks(run), *_steps(run), *_instants(run)]


def request_spans(run: RunTables) -> dict[str, list[Span]]:
    """What each request did when, in order; a span lies before or inside the one before it."""
    log = run.need("decisions", "step_id", "time_s", "kind", "request_id", "num_tokens", "detail")
    durations = run.need("steps", "step_id", "duration_s").set_index("step_id")["duration_s"]
    events = log[log["kind"] != Kind.REJECTED]  # those never became requests
    return {
        str(name): _life(own.to_dict("records"), durations, run.origin_s)
        for name, own in events.groupby("request_id", sort=False)
    }


def _life(
    events: list[dict[Any, Any]], durations: "pd.Series[float]", origin_s: float
) -> list[Span]:
    spans: list[Span] = []
    chunks: list[Span] = []
    state, since_s = "", 0.0
    for event in events:
        kind, now_s = event["kind"], event["time_s"] - origin_s
        if kind == Kind.CHUNK:
            length_s = durations.get(event["step_id"], 0.0)  # none: the step failed
            tokens = {"tokens": event["num_tokens"]}
            chunks.append(Span(f"chunk of {event['num_tokens']}", now_s, now_s + length_s, tokens))
        becomes = _BECOMES.get(kind)
        if becomes is None or (kind == Kind.ENTERED and state == "running"):
            continue  # a request of several sequences enters several rows
        if kind == Kind.RELEASED and state != "held":
            continue  # one of several sequences has ended
        if state:
            detail = {"detail": event["detail"]} if event["detail"] else {}
            spans.append(Span(state, since_s, now_s, detail))
        if state == "running":
            spans += _inside(chunks, since_s, now_s)
            chunks = []
        state, since_s = becomes, now_s
    return [span for span in spans if span.end_s > span.start_s or span.name != "held"]


_BECOMES = {
    Kind.ARRIVED: "waiting",
    Kind.ENTERED: "running",
    Kind.PREEMPTED: "preempted",
    Kind.FINISHED: "held",
    Kind.RELEASED: "",
}


def _inside(chunks: list[Span], start_s: float, end_s: float) -> list[Span]:
    """The chunks of a stay, and the decoding after the last of them."""
    cut = [chunk._replace(end_s=min(chunk.end_s, end_s)) for chunk in chunks]
    last_s = max([start_s, *(chunk.end_s for chunk in cut)])
    return [*cut, Span("decoding", last_s, end_s, {})] if end_s > last_s else cut


def _request_tracks(run: RunTables) -> Iterator[TraceEvent]:
    for tid, (name, spans) in enumerate(request_spans(run).items(), start=1):
        yield _meta("thread_name", REQUESTS, tid, name)
        for span in spans:
            yield _span(REQUESTS, tid, span)


def _row_tracks(run: RunTables) -> Iterator[TraceEvent]:
    line = timeline(run)
    for row in range(line.num_rows):
        yield _meta("thread_name", ROWS, row + 1, f"row {row}")
    for stay in line.stays:
        whole = Span(stay.request_id, stay.start_s, stay.end_s, {})
        yield _span(ROWS, stay.row + 1, whole)
        if stay.end_s > stay.finished_s:
            yield _span(ROWS, stay.row + 1, Span("dead", stay.finished_s, stay.end_s, {}))


def _steps(run: RunTables) -> Iterator[TraceEvent]:
    steps = run.need(
        "steps", "start_s", "duration_s", "compile_s", "num_compiles", "num_tokens", "num_rows",
        "padded_tokens", "num_running", "num_waiting",
    )  # fmt: skip
    for step in steps.to_dict("records"):
        start_s = step["start_s"] - run.origin_s
        name = f"{step['num_tokens']} tokens, {step['num_rows']} rows"
        args = {str(key): value for key, value in step.items()}
        yield _span(ENGINE, STEPS, Span(name, start_s, start_s + step["duration_s"], args))
        if step["num_compiles"]:
            name = f"{step['num_compiles']} compilations"
            yield _span(ENGINE, COMPILES, Span(name, start_s, start_s + step["compile_s"], {}))
        slots = {k.removeprefix("slots_"): v for k, v in args.items() if k.startswith("slots_")}
        padding = step["padded_tokens"] - step["num_tokens"]
        requests = {"running": step["num_running"], "waiting": step["num_waiting"]}
        yield _counter("KV slots", start_s, slots)
        yield _counter("requests", start_s, requests)
        yield _counter("tokens", start_s, {"real": step["num_tokens"], "padding": padding})
    yield _counter("requests", run.end_s, {"running": 0, "waiting": 0})
    yield _counter("tokens", run.end_s, {"real": 0, "padding": 0})


def _instants(run: RunTables) -> Iterator[TraceEvent]:
    for event in run.need("decisions").to_dict("records"):
        kind = event["kind"]
        if kind != Kind.PREEMPTED and kind not in _INSTANTS:
            continue
        tid = PREEMPTIONS if kind == Kind.PREEMPTED else DECISIONS
        ts = _microseconds(event["time_s"] - run.origin_s)
        args = {"tokens": event["num_tokens"], "detail": event["detail"]}
        name = f"{event['request_id']} {kind}"
        yield {
            "ph": "i", "s": "t", "name": name, "ts": ts, "pid": ENGINE, "tid": tid, "args": args
        }  # fmt: skip


def _names(run: RunTables) -> Iterator[TraceEvent]:
    for pid, name in _PROCESSES.items():
        yield _meta("process_name", pid, 0, name if pid != ENGINE else f"engine: {run.title}")
    for tid, name in _ENGINE_TRACKS.items():
        yield _meta("thread_name", ENGINE, tid, name)


def _meta(what: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(pid: int, tid: int, span: Span) -> TraceEvent:
    """Both ends are rounded, so that what is nested stays nested."""
    start, end = _microseconds(span.start_s), _microseconds(span.end_s)
    return {
        "ph": "X", "name": span.name, "ts": start, "dur": round(end - start, 3),
        "pid": pid, "tid": tid, "args": span.args,
    }  # fmt: skip


def _counter(name: str, time_s: float, values: dict[str, int]) -> TraceEvent:
    ts = _microseconds(time_s)
    return {"ph": "C", "name": name, "ts": ts, "pid": ENGINE, "tid": 0, "args": values}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
