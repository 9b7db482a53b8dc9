"""`paxserve replay`: the same requests with forced lengths, under the same and other policies."""

import json
import sys
from dataclasses import replace

import pandas as pd
import pyarrow.parquet as pq
import pytest

from paxserve.cli import main
from paxserve.recorded import read_arrivals, with_forced_length
from paxserve.replay import replay
from paxserve.report.run_tables import RunTables

# One row and a long request in front of many short ones: the order is everything.
SKEWED = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 25}] + [
    {"prompt_token_ids": [8, 9, i], "max_tokens": 1 + i % 3, "arrival_s": 0.25, "client": "b"}
    for i in range(30)
]
SIZES = ("limits.max_model_len=32", "limits.block_size=4", "limits.max_num_seqs=1",
         "limits.num_blocks_override=33")  # fmt: skip
FIGURES = ["ttft_s", "tpot_s", "e2e_s", "queue_time_s"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


def recorded(*overrides, requests=SKEWED, run_dir="first"):
    with open("requests.jsonl", "w") as file:
        file.writelines(json.dumps(request) + "\n" for request in requests)
    workload = ("workload=jsonl", "workload.path=requests.jsonl")
    if any(override.startswith("workload") for override in overrides):
        workload = ()
    arguments = ["run", "executor=scripted", *SIZES, *workload, *overrides, f"run_dir={run_dir}"]
    assert main(arguments) == 0
    return RunTables.read(run_dir)


def replayed(run, *overrides, out="second"):
    return replay(run, overrides, out=out, say=lambda _: None, progress=lambda *_: None)


def test_arrivals_are_what_is_needed_to_send_a_request_again(workplace):
    run = recorded("sampling=random")
    arrivals = read_arrivals(run.path)
    assert [a.request_id for a in arrivals] == run.requests["request_id"].tolist()
    assert [list(a.prompt_token_ids) for a in arrivals] == [r["prompt_token_ids"] for r in SKEWED]
    assert [a.arrival_s for a in arrivals] == [r.get("arrival_s", 0.0) for r in SKEWED]
    assert [a.origin.num_true_output_tokens for a in arrivals] == [r["max_tokens"] for r in SKEWED]
    assert {a.origin.client for a in arrivals} == {"", "b"}
    assert len({a.seed for a in arrivals}) == len(SKEWED)
    forced = [with_forced_length(replace(a, max_tokens=None, ignore_eos=False)) for a in arrivals]
    assert [(a.max_tokens, a.ignore_eos) for a in forced] == [
        (r["max_tokens"], True) for r in SKEWED
    ]
    (workplace / "first" / "arrivals.jsonl").write_text('{"id": "0"}\n')
    with pytest.raises(ValueError, match=r"arrivals.jsonl line 1 is no recorded arrival"):
        read_arrivals(run.path)


@pytest.mark.parametrize(
    "how",
    [
        ["sampling=random", "limits.max_num_seqs=3"],
        ["prefix_cache=radix", "gate=[watermark,token_ratio]", "admission=vtc"],
        ["preemption=swap", "limits.num_host_blocks_override=9", "limits.preempt_every_steps=4"],
        ["workload=synthetic", "workload/arrivals=closed_loop", "workload/lengths=fixed",
         "workload.lengths.input_tokens=5", "workload.lengths.output_tokens=6",
         "workload.arrivals.num_users=3", "workload.num_requests=12", "limits.max_num_seqs=2"],
    ],
    ids=["random", "cache", "swap", "closed loop"],
)  # fmt: skip
def test_under_its_own_policies_nothing_differs_and_the_run_is_the_recorded_one(how):
    run = recorded(*how)
    found = replayed(run)
    table = pd.DataFrame(found.records)
    for figure in FIGURES:
        assert (table[figure].dropna() == 0.0).all()
        assert found.figures[figure][1:] == (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    own = RunTables.read("second/own").requests
    shared = ["request_id", "output_token_ids", "num_preemptions", "num_cached_tokens"]
    for column in shared:
        assert own[column].map(str).tolist() == run.requests[column].map(str).tolist()
    for figure in FIGURES:
        assert own[figure].tolist() == pytest.approx(run.requests[figure].tolist(), nan_ok=True)


def test_shortest_first_helps_most_requests_and_the_interval_says_so(workplace, capsys):
    recorded("limits.max_num_seqs=1", requests=[*SKEWED[:1], *reversed(SKEWED[1:]), *SKEWED[1:9]])
    capsys.readouterr()
    assert main(["replay", "first", "admission=sjf", "--out", "second"]) == 0
    out = capsys.readouterr().out
    assert "arrivals as recorded, also of a closed loop" in out
    table = pq.read_table(workplace / "second" / "paired.parquet").to_pandas()
    mean = table["ttft_s"].mean()
    assert mean < 0
    assert f"{mean:+.4g}" in out
    found = replayed(RunTables.read("first"), "admission=sjf", out="third")
    figure = found.figures["ttft_s"]
    assert figure.mean == pytest.approx(mean)
    assert figure.high < 0
    assert figure.share_better > 0.5
    back = replayed(RunTables.read("second/other"), "admission=fcfs", out="fourth").figures[
        "ttft_s"
    ]
    assert back.mean == pytest.approx(-figure.mean)
    assert back.low > 0
    chosen = [RunTables.read(f"second/{name}").engine["policies"]["admission"]["class"] for name in
              ("own", "other")]  # fmt: skip
    assert [name.rsplit(":", 1)[-1] for name in chosen] == ["Fcfs", "Sjf"]


def test_settings_of_the_run_stay_where_nothing_is_said_of_them():
    run = recorded("admission=sjf", "admission.error=0.5", "limits.block_size=2", "seed=7")
    found = replayed(run, "batching=textbook", "limits.max_num_seqs=2")
    limits = found.second.engine.limits
    assert (limits.block_size, limits.max_num_seqs, limits.max_model_len) == (2, 2, 32)
    assert found.first.engine.limits.max_num_seqs == 1
    assert found.second.engine.scheduler.policies.admission.error == 0.5
    config = RunTables.read("second/other").config
    assert (config["seed"], config["choices"]["batching"]) == (7, "textbook")
    assert config["workload"] == {"recorded": "first"}


def test_mistakes_are_a_line(workplace, monkeypatch, capsys):
    (workplace / "my_order.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Mine:\n"
        "    displaces_running = False\n"
        "    def key(self, state, request):\n"
        "        return (request.arrival_s,)\n"
    )
    monkeypatch.setattr(sys, "path", [str(workplace), *sys.path])
    recorded("admission=my_order:Mine", run_dir="mine")
    run = recorded()
    (run.path / "arrivals.jsonl").rename(run.path / "gone")
    for arguments, words in (
        (["mine"], "admission is not one of the project's own; name it again"),
        (["first"], "arrivals.jsonl does not exist"),
        (["nowhere"], "nowhere holds no finished run"),
    ):
        assert main(["replay", *arguments, "--out", "x"]) == 2
        err = capsys.readouterr().err
        assert words in err
    (run.path / "gone").rename(run.path / "arrivals.jsonl")
    assert main(["replay", "first", "eviction=lfu", "--out", "x"]) == 2
    assert "eviction was set, but nothing reads it" in capsys.readouterr().err
    assert main(["replay", "mine", "admission=my_order:Mine", "--out", "y"]) == 0


def test_what_cannot_be_served_is_refused_before_anything_is(capsys, workplace):
    recorded()
    for asked, words in (
        (["batching=static", "limits.max_num_batched_tokens=8"], "max_num_batched_tokens"),
        (["limits.no_such=2"], "limits.no_such"),
        (["victim=newest", "reservation=max"], "victim was set, but nothing reads it"),
    ):
        assert main(["replay", "first", *asked, "--out", "x"]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert "replay of" not in err
        assert not (workplace / "x" / "own").exists()
