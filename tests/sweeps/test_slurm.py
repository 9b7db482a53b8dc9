"""The same cells as jobs of submitit: without it, what is said; with it, on this machine."""

import sys

import pyarrow.parquet as pq
import pytest
import yaml
from test_sweep import REAL, cli  # noqa: F401

from paxserve.sweep import slurm
from paxserve.sweep.cell import Cell
from paxserve.sweep.directory import SweepDirectory

LOCAL = ("hydra/launcher=slurm", "hydra.launcher.cluster=local", "hydra.launcher.timeout_min=5")


def test_without_submitit(cli, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "submitit", None)
    code, _, err = cli(*REAL, *LOCAL, "seed=0,1", "run_dir=sweep")
    assert code == 2
    assert "hydra/launcher=slurm needs submitit: pip install 'paxserve[slurm]'" in err
    assert not (tmp_path / "sweep").exists()


def test_there_are_two_clusters():
    with pytest.raises(ValueError, match="cluster must be slurm or local, got 'moon'"):
        slurm.array_of_jobs("moon", {})


class Jobs:
    """As much of submitit as is used: what was asked of it, and jobs that end as they are told."""

    def __init__(self, *errors):
        self.errors, self.asked, self.cancelled = errors, {}, []

    def AutoExecutor(self, **asked):
        self.asked.update(asked)
        return self

    def update_parameters(self, **asked):
        self.asked.update(asked)

    def map_array(self, function, *arguments):
        calls = zip(self.errors, zip(*arguments, strict=True), strict=True)
        return [Job(self, function, error, one) for error, one in calls]


class LostAfterwards(RuntimeError):
    """Its job had ended the cell before."""


def end(directory, cell, marker):
    """A run of the cell has ended."""
    running = directory.begin(cell)
    (running / marker).write_text("")
    directory.keep(cell.name, running)


class Job:
    def __init__(self, jobs, function, error, arguments):
        self.jobs, self.call, self.error = jobs, (function, arguments), error

    def done(self):
        if isinstance(self.error, KeyboardInterrupt):
            raise self.error
        if isinstance(self.error, LostAfterwards):
            path, asked = self.call[1]
            end(SweepDirectory(path), Cell.from_json(asked), "complete")
        return True

    def exception(self):
        return self.error

    def cancel(self, check):
        self.jobs.cancelled.append(self)


class Ends:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def on_running(self, number):
        assert number > 0

    def on_ended(self, ended, num_running):
        self.told.append((str(ended.state), num_running))


def cells(number):
    return [
        Cell(overrides=(), keys=("seed",), config={"choices": {}, "seed": n}) for n in range(number)
    ]


def test_what_is_asked_of_slurm(tmp_path, monkeypatch):
    """Empty settings are the cluster's own, and a lost job is a failed cell."""
    jobs = Jobs(None, RuntimeError("node 7 is gone"))
    monkeypatch.setitem(sys.modules, "submitit", jobs)
    monkeypatch.setattr(slurm, "_POLL_S", 0.0)
    resources = {"array_parallelism": 3, "partition": None, "mem_gb": 2, "setup": []}
    directory, ends = SweepDirectory.made(tmp_path), Ends()
    end(directory, cells(2)[0], "complete")
    run = slurm.array_of_jobs("slurm", resources)
    run(directory, cells(2), 0, ends)
    assert jobs.asked == {
        "folder": tmp_path / "submitit", "cluster": "slurm", "name": "paxserve",
        "slurm_array_parallelism": 3, "mem_gb": 2,
    }  # fmt: skip
    assert ends.told == [("complete", 1), ("failed", 0)]
    note = (tmp_path / cells(2)[1].name / "error.txt").read_text()
    assert note == "the job was lost\n\nnode 7 is gone\n"
    assert jobs.cancelled == []


@pytest.mark.parametrize("before", [None, "error.txt", "complete"])
def test_a_lost_job_takes_nothing_that_has_ended_with_it(tmp_path, monkeypatch, before):
    """Whatever was there before: the job of the first cell has ended it, that of the other not."""
    monkeypatch.setattr(slurm, "_POLL_S", 0.0)
    jobs = Jobs(LostAfterwards("time limit"), RuntimeError("time limit"))
    monkeypatch.setitem(sys.modules, "submitit", jobs)
    directory, ends = SweepDirectory.made(tmp_path), Ends()
    for cell in cells(2):
        if before is not None:
            end(directory, cell, before)
    slurm.array_of_jobs("slurm", {})(directory, cells(2), 0, ends)
    assert ends.told == [("complete", 1), ("failed", 0)]
    assert [str(directory.state(cell)) for cell in cells(2)] == ["complete", "failed"]


def test_an_interrupt_ends_the_jobs(tmp_path, monkeypatch):
    jobs = Jobs(None, KeyboardInterrupt(), None)
    monkeypatch.setitem(sys.modules, "submitit", jobs)
    monkeypatch.setattr(slurm, "_POLL_S", 0.0)
    run = slurm.array_of_jobs("slurm", {})
    with pytest.raises(KeyboardInterrupt):
        run(SweepDirectory.made(tmp_path), cells(3), 0, Ends())
    assert len(jobs.cancelled) >= 2


def test_the_same_sweep_by_jobs_and_by_processes(cli, tmp_path):  # noqa: F811
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    sweep = (*REAL, "limits.num_blocks_override=9,1")
    for name, more in {"processes": (), "jobs": LOCAL}.items():
        code, _, err = cli(*sweep, *more, f"run_dir={name}")
        assert code == 1, err
        assert "FAILED: num_blocks_override must be an integer of at least 2, got 1" in err
    tables = [(tmp_path / name / "table.csv").read_text() for name in ("processes", "jobs")]
    assert tables[0] == tables[1]
    rows = pq.read_table(tmp_path / "jobs" / "table.parquet").to_pylist()
    assert [row["state"] for row in rows] == ["failed", "complete"]
    config = yaml.safe_load((tmp_path / "jobs" / rows[1]["cell"] / "config.yaml").read_text())
    assert config["run_dir"] == str(tmp_path / "jobs" / rows[1]["cell"])
    again = cli(*sweep, *LOCAL, "run_dir=jobs", "resume=failed")
    assert "2 cells (1 failed, 1 complete); 1 to run" in again[2]
