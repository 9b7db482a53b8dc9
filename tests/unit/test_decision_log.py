"""Every kind of decision is in the log, in `decisions.parquet` and in the Perfetto trace."""

from collections import Counter

import pytest
from axes import name_of, policies
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit
from saved_runs import save

from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.static import Static
from paxserve.events import UNASKED, Kind
from paxserve.gate.watermark import Watermark
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.report.perfetto import DECISIONS, ENGINE, PREEMPTIONS, trace_events

LOGGED = set(Kind) - {Kind.SERVED, Kind.TIMER}


def eventful():
    """A pool of 11 blocks and everything that can happen in it."""
    limits = make_limits(max_num_seqs=3, num_blocks=12, max_num_batched_tokens=8)
    engine = make_engine(limits, prefix_cache=HashChain(publish="planning"))
    for i, length in enumerate([9, 10, 5, 8, 3]):
        submit(engine, prompt_ids(length, salt=i % 3), max_tokens=9 - i, request_id=f"r{i}")
    submit(engine, prompt_ids(9), max_tokens=6, n=3, temperature=1.0, request_id="three")
    with pytest.raises(ValueError, match="prompt is empty"):
        submit(engine, [], request_id="nobody")
    run_to_end(engine)
    return engine


def num_of(log, kind):
    """Events of this kind; those of a request's several rows in one step are one."""
    return len(log[log["kind"] == kind].drop_duplicates(["step_id", "request_id"]))


def test_every_kind_is_logged_and_adds_up(tmp_path):
    engine = eventful()
    run = save(engine, tmp_path / "run")
    log = run.decisions
    assert set(log["kind"]) == LOGGED
    assert log["kind"].tolist() == [str(event.kind) for event in engine.events]
    counts = Counter(log["kind"])
    assert counts["arrived"] == counts["finished"] == num_of(log, "released") == 6
    assert num_of(log, "entered") - counts["preempted"] == 6
    assert counts["entered"] - num_of(log, "entered") == 2  # the other two rows of three samples
    assert counts["preempted"] == run.summary["num_preemptions"] > 0
    assert (counts["rejected"], log[log.kind == "rejected"]["request_id"].item()) == (1, "nobody")
    size, by_kind = engine.limits.block_size, log.groupby("kind")["num_tokens"].sum()
    assert by_kind["evicted"] == size * run.steps["num_evicted"].sum() > 0
    assert by_kind["copied"] == size * run.steps["num_copied"].sum() > 0
    decodes = run.steps["num_tokens"].sum() - by_kind["chunk"]
    assert 0 < decodes < run.steps["num_rows"].sum()


def test_every_decision_is_in_the_trace(tmp_path):
    run = save(eventful(), tmp_path / "run")
    events = trace_events(run)
    instants = Counter(
        (event["tid"], event["name"].split()[-1])
        for event in events
        if event["ph"] == "i" and event["pid"] == ENGINE
    )
    counts = Counter(run.decisions["kind"])
    assert instants == {
        (PREEMPTIONS, "preempted"): counts["preempted"],
        **{
            (DECISIONS, kind): counts[kind]
            for kind in ("rejected", "held_back", "evicted", "copied")
        },
    }
    spans = Counter(event["name"].split()[0] for event in events if event["ph"] == "X")
    assert spans["waiting"] == counts["arrived"]
    assert spans["running"] == num_of(run.decisions, "entered")
    assert spans["chunk"] == counts["chunk"]
    details = {event["args"]["detail"] for event in events if event["name"].endswith("held_back")}
    assert details == set(run.decisions[run.decisions.kind == "held_back"]["detail"])
    assert {"budget", "rows"} <= details


def held_back(engine):
    return [(e.step_id, e.request_id, e.detail) for e in engine.events if e.kind is Kind.HELD_BACK]


def two_requests(*, first=(3, 3), second=(3, 2), sizes=None, **chosen):
    engine = make_engine(make_limits(**(sizes or {})), **chosen)
    submit(engine, prompt_ids(first[0]), max_tokens=first[1], request_id="a")
    submit(engine, prompt_ids(second[0], salt=1), max_tokens=second[1], request_id="b")
    run_to_end(engine)
    return engine


REASONS = {
    "rows": ({"sizes": {"max_num_seqs": 1}}, ["rows"] * 3),
    "budget": (
        {"first": (4, 1), "sizes": {"max_num_seqs": 4, "max_num_batched_tokens": 4}},
        ["budget"],
    ),
    "blocks": (
        {"first": (8, 3), "second": (5, 2), "sizes": {"num_blocks": 4}},
        ["blocks"] * 3,
    ),
    "gate": (
        {"sizes": {"num_blocks": 5}, "gates": (Watermark(share=0.75),)},
        ["gate: watermark"] * 3,
    ),
    "unasked": ({"batching": Static(), "sizes": {"max_num_seqs": 1}}, ["rows", UNASKED, UNASKED]),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_head_is_held_back_with_the_reason_in_each_step_it_waits(reason):
    how, details = REASONS[reason]
    engine = two_requests(**how)
    found = held_back(engine)
    assert {request for _, request, _ in found} == {"b"}
    assert [":".join(detail.split(":")[:2]) for _, _, detail in found] == details
    assert [step for step, _, _ in found] == list(range(1, len(details) + 1))
    entered = next(e for e in engine.events if e.kind is Kind.ENTERED and e.request_id == "b")
    assert entered.step_id == len(details) + 1


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
def test_whoever_waits_at_the_head_is_named_in_every_step(batching):
    """Unless it was preempted in that very step, and then the log says so."""
    limits = make_limits(max_num_seqs=3, num_blocks=12, max_num_batched_tokens=32)
    engine = make_engine(limits, batching=batching)
    for i, length in enumerate([9, 10, 5, 8, 3, 7]):
        submit(engine, prompt_ids(length, salt=i), max_tokens=9 - i, request_id=f"r{i}")
    num_checked = 0
    while engine.has_work:
        before, num_steps = len(engine.events), len(engine.steps)
        engine.step()
        head = engine.scheduler.batch.waiting.head()
        if head is None or len(engine.steps) == num_steps:
            continue
        said = [e.kind for e in engine.events.since(before) if e.request_id == head.request_id]
        assert Kind.HELD_BACK in said or Kind.PREEMPTED in said, (engine.events.step_id, head)
        num_checked += 1
    assert num_checked > 5


def test_a_chunk_is_logged_with_its_row_and_a_decode_is_not():
    limits = make_limits(max_num_batched_tokens=4)
    engine = make_engine(limits, batching=ChunkedPrefill())
    submit(engine, prompt_ids(9), max_tokens=3, request_id="a")
    run_to_end(engine)
    chunks = [(e.step_id, e.num_tokens, e.row) for e in engine.events if e.kind is Kind.CHUNK]
    # The last chunk is one token long, as a decode is: step records count it.
    assert chunks == [(1, 4, 0), (2, 4, 0)]
    assert [step.num_tokens for step in engine.steps] == [4, 4, 1, 1, 1]
