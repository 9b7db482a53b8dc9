"""`paxserve capacity`, with engines that run on a virtual clock."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml

from paxserve.cli import main

ENGINE = (
    "executor=scripted", "executor.step_s=0.1", "limits.max_model_len=64",
    "limits.num_blocks_override=65", "limits.max_num_seqs=4", "workload=synthetic",
    "workload.num_requests=40", "workload.lengths.input_tokens=8",
    "workload.lengths.output_tokens=10",
)  # fmt: skip
# Four rows, a request takes ten steps of 0.1 s: four requests per second.
SERVED = 4.0
SLO = ("--slo", "median_queue_time_ms=500")


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])

    def run(*arguments):
        try:
            code = main(("capacity", *arguments))
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        file = tmp_path / "out" / "capacity.json"
        found = json.loads(file.read_text()) if file.exists() else None
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, found=found)

    return run


def runs_in(path):
    """When each was made."""
    found = [p for p in path.glob("*/complete") if ".running-" not in p.parent.name]
    return {p.parent.name: p.stat().st_mtime_ns for p in found}


def test_the_highest_rate(cli, tmp_path):
    done = cli(*SLO, "--out", "out", *ENGINE)
    assert done.code == 0, done.err
    found = done.found
    assert found["outcome"] == "found"
    assert found["rate"] < found["broken_at"] <= found["rate"] * 1.02
    assert 0.5 * SERVED < found["rate"] < 1.2 * SERVED
    assert "capacity: median_queue_time_ms <= 500 is met up to" in done.out
    # Each probe is a run that can be looked at, and says what the answer says.
    assert len(runs_in(tmp_path / "out")) == len(found["probes"])
    table = pq.read_table(tmp_path / "out" / "table.parquet").to_pylist()
    assert [row["workload.arrivals.rate"] for row in table] == [p["rate"] for p in found["probes"]]
    for row, probe in zip(table, found["probes"], strict=True):
        requests = pq.read_table(tmp_path / "out" / row["cell"] / "requests.parquet").to_pylist()
        queues = sorted(request["queue_time_s"] for request in requests)
        median_ms = 500 * (queues[19] + queues[20])
        assert probe["median_queue_time_ms"] == pytest.approx(median_ms)
        assert probe["is_met"] == (median_ms <= 500)
        assert f"rate {probe['rate']:g}/s: {'met' if probe['is_met'] else 'not met'}" in done.err
        config = yaml.safe_load((tmp_path / "out" / row["cell"] / "config.yaml").read_text())
        assert config["workload"]["arrivals"]["rate"] == probe["rate"]


def test_a_second_search_runs_only_what_is_missing(cli, tmp_path):
    first = cli(*SLO, "--out", "out", *ENGINE)
    runs = runs_in(tmp_path / "out")
    again = cli(*SLO, "--out", "out", *ENGINE)
    assert again.found == first.found
    assert runs_in(tmp_path / "out") == runs
    finer = cli(*SLO, "--tolerance", "0.004", "--out", "out", *ENGINE)
    assert first.found["rate"] <= finer.found["rate"] < first.found["broken_at"]
    more = runs_in(tmp_path / "out")
    assert {name: when for name, when in more.items() if name in runs} == runs
    assert len(more) == len(finer.found["probes"]) > len(runs)


def test_goodput(cli):
    """The same bounds by a condition of its own and by the run's own figure."""
    conditions = "ttft_ms<=500 tpot_ms<=150 share>=0.9"
    done = cli("--slo", conditions, "--out", "out", "--tolerance", "0.1", *ENGINE,
               "goodput.ttft_ms=500", "goodput.tpot_ms=150")  # fmt: skip
    assert done.found["outcome"] == "found"
    assert done.found["slo_per_request"] == {"ttft_ms": 500, "tpot_ms": 150}
    for probe in done.found["probes"]:
        assert probe["is_met"] == (probe["goodput_share"] >= 0.9)
        assert probe["request_goodput"] * probe["duration"] == pytest.approx(
            40 * probe["goodput_share"]
        )
    shares = [probe["goodput_share"] for probe in done.found["probes"]]
    assert shares[0] == 1.0
    assert min(shares) < 0.9


def test_an_slo_that_no_rate_meets(cli):
    done = cli("--slo", "p99_itl_ms=99", "--out", "out", *ENGINE)
    assert done.code == 0
    assert "no rate meets p99_itl_ms <= 99: at " in done.out
    assert "p99_itl_ms is 100" in done.out
    assert (done.found["outcome"], done.found["rate"]) == ("no rate meets it", None)


def test_an_slo_that_every_rate_meets(cli):
    done = cli("--slo", "p99_itl_ms=101", "--out", "out", *ENGINE)
    assert done.code == 0
    assert done.found["outcome"] == "every rate meets it"
    assert done.found["saturation"]["output_throughput"] == pytest.approx(40, rel=0.1)
    assert "is met at every rate tried, up to" in done.out
    assert "saturated from" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slo", "p99_itl_m=5"], "p99_itl_m is no figure of a run; there are"),
        (["--slo", "p99_itl_ms=nan"], "must bound p99_itl_ms by a number"),
        ([*SLO, "--tolerance", "0"], "tolerance must be a number from 0.0001 to 1"),
        ([*SLO, "workload.arrivals.rate=3"], "workload.arrivals.rate is what is searched for"),
        ([*SLO, "workload/arrivals=all_at_once"], "this workload has no workload.arrivals.rate"),
        ([*SLO, "limits.block_size=0"], "block_size must be an integer of at least 1"),
        ([*SLO, "limits.rows=0"], "limits.rows"),
        ([*SLO, "workload.lengths.input_tokens=1000"],
         "40 of 40 refused, the first because the prompt has 1000 tok"),
        (["--slo", "p99_itl_ms=5", "workload.lengths.output_tokens=1"],
         "at rate 1: p99_itl_ms is undefined"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_what_cannot_be_answered(cli, arguments, words):
    done = cli("--out", "out", *ENGINE, *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err + done.out
    assert done.found is None


def test_a_killed_search_goes_on(cli, tmp_path):
    command = [sys.executable, "-m", "paxserve", "capacity", *SLO, "--out", "out", *ENGINE]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=-3, stdout=-3)
    while len(runs_in(tmp_path / "out")) < 2:
        time.sleep(0.01)
    running.kill()
    running.wait()
    left = runs_in(tmp_path / "out")
    done = cli(*SLO, "--out", "out", *ENGINE)
    assert done.code == 0
    assert {n: when for n, when in runs_in(tmp_path / "out").items() if n in left} == left
    assert len(runs_in(tmp_path / "out")) == len(done.found["probes"])
    assert not list((tmp_path / "out").glob("*.running-*"))


def test_goodput_of_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    more = ("workload.arrivals.rate=8", "goodput.ttft_ms=1000", f"run_dir={tmp_path / 'run'}")
    assert main(["run", *ENGINE, *more]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    requests = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    good = sum(request["ttft_s"] <= 1 for request in requests)
    assert 0 < good < 40
    assert summary["goodput_share"] == good / 40
    assert summary["request_goodput"] == pytest.approx(good / summary["duration"])
    capsys.readouterr()
    assert main(["run", *ENGINE, "goodput.ttft_ms=-1", f"run_dir={tmp_path / 'wrong'}"]) == 2
    assert "ttft_ms must be a number above 0" in capsys.readouterr().err
