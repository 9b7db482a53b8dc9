"""Experiments in a notebook or script: `paxserve.run`, `paxserve.compare`.

Owns: `Result` and `Comparison`, and where a run's files go when nobody says. In: the overrides of
the command line, and policy objects. Out: data frames and pictures, read back from the files that
`paxserve run` would have written. Must not know: how a run is made or drawn.
"""

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from paxserve import experiment
from paxserve.hydra_config import compose_config
from paxserve.report.perfetto import write_trace
from paxserve.report.pictures import PICTURES
from paxserve.report.run_tables import RunTables
from paxserve.report.style import Picture
from paxserve.results import new_run_dir, write_results
from paxserve.terminal import Terminal
from paxserve.tracking import TRACKER, Tracking


class _Plots:
    """The pictures of one run or of several; each shows itself in a notebook."""

    def _tables(self) -> list[RunTables]:
        raise NotImplementedError

    def plot_timeline(self) -> Picture:
        """Who was in which row when."""
        return PICTURES["timeline"](self._tables())

    def plot_blocks(self) -> Picture:
        """Who held which KV block when."""
        return PICTURES["blocks"](self._tables())

    def plot_memory(self) -> Picture:
        """What KV memory held on average: the bars of Figure 2 of the vLLM paper."""
        return PICTURES["memory"](self._tables())

    def plot_kv(self) -> Picture:
        """What KV memory held over time, and how many requests ran and waited."""
        return PICTURES["kv"](self._tables())

    def plot_latency(self) -> Picture:
        """How TTFT and ITL are distributed."""
        return PICTURES["latency"](self._tables())


class Result(_Plots):
    """One run. `tables` holds everything; the properties are its parts.

    Files that nobody asked for lie in a temporary directory until Python exits.
    """

    def __init__(self, tables: RunTables) -> None:
        self.tables = tables

    @classmethod
    def read(cls, path: str | Path, *, name: str | None = None) -> "Result":
        """A saved run.

        Raises:
            ValueError: there is no finished run.
        """
        return cls(RunTables.read(path, name=name))

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.tables.path

    @property
    def name(self) -> str:
        """What tables and pictures call it."""
        return self.tables.name

    @property
    def summary(self) -> "pd.Series[float]":
        """Every figure of the run."""
        return pd.Series(self.tables.summary, name=self.name)

    @property
    def requests(self) -> pd.DataFrame:
        """A row per request."""
        return self.tables.requests

    @property
    def steps(self) -> pd.DataFrame:
        """A row per step."""
        return self.tables.steps

    @property
    def decisions(self) -> pd.DataFrame:
        """A row per event: who entered, who did not and why, who was preempted."""
        return self.tables.need("decisions")

    @property
    def ledger(self) -> pd.DataFrame:
        """Slots per class, a row per step."""
        return self.tables.ledger

    def write_trace(self, path: str | Path | None = None) -> Path:
        """Write a timeline for ui.perfetto.dev; default: trace.json.gz beside the run."""
        target = self.path / "trace.json.gz" if path is None else Path(path)
        write_trace(self.tables, target)
        return target

    def _tables(self) -> list[RunTables]:
        return [self.tables]

    def __repr__(self) -> str:
        figures = self.tables.summary
        return (
            f"Result({self.tables.title}: {figures.get('completed')} of "
            f"{figures.get('num_requests')} requests completed in {self.tables.end_s:.1f} s)"
        )


class Comparison(_Plots):
    """Several runs by name."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self.results = dict(results)

    def __getitem__(self, name: str) -> Result:
        return self.results[name]

    @property
    def table(self) -> pd.DataFrame:
        """Tidy: a row per run; its policies, then every figure of its summary."""
        rows = {
            name: {**result.tables.policies, **result.tables.summary}
            for name, result in self.results.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")

    @property
    def requests(self) -> pd.DataFrame:
        """The requests of all runs, with a column `run`."""
        named = {name: result.requests for name, result in self.results.items()}
        return pd.concat(named, names=["run"]).reset_index("run")

    def plot_throughput(self) -> Picture:
        """Throughput against latency: a point per run, a line per set of policies."""
        return PICTURES["throughput"](self._tables())

    def _tables(self) -> list[RunTables]:
        return [result.tables for result in self.results.values()]

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.results)})"


def run(
    overrides: Sequence[str] = (),
    *,
    policies: Mapping[str, object] | None = None,
    name: str | None = None,
) -> Result:
    """Run one experiment, as `paxserve run` does.

    Args:
        overrides: `GROUP=CHOICE` and `GROUP.KEY=VALUE`; `run_dir=DIR` keeps the files.
        policies: axis -> a policy object in place of a choice: an instance of a frozen dataclass,
            which may be defined in a cell. `cost_model` is such an axis, too.
        name: what tables and pictures call it; default: its directory's name, or `run`.

    Raises:
        ValueError: settings that are wrong, do not go together, or that nothing reads.
        ServingFailed: anything that goes wrong after they were accepted.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides must be a list of strings, got {overrides!r}")
    own = dict(policies or {})
    plain, choices, explicit = compose_config(overrides)
    wanted = plain.get("run_dir")
    path = new_run_dir(wanted) if wanted else _temporary()
    terminal, tracking = Terminal(), Tracking.of({"choices": choices, **plain}, path)
    try:
        done = experiment.run(
            plain,
            choices=choices,
            explicit=[key for key in explicit if key.partition(".")[0] not in (TRACKER, "run_dir")],
            say=terminal.say,
            progress=terminal.progress,
            policies=own,
            tracking=tracking,
        )
        tracking.end(done.summary)
    finally:
        terminal.close()
        tracking.end(None)
    recorded = choices | {axis: repr(policy) for axis, policy in own.items()}
    write_results(done, path, config={"choices": recorded, **plain, **{axis: {} for axis in own}})
    return Result.read(path, name=name if name or wanted else "run")


def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="paxserve-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def compare(
    runs: Mapping[str, Sequence[str] | Result] | Sequence[Sequence[str]],
    *,
    common: Sequence[str] = (),
) -> Comparison:
    """Run several experiments and put them side by side.

    Args:
        runs: name -> overrides, or a result that is there already; or a list of overrides, which
            name the runs.
        common: overrides of all.

    Raises:
        ValueError: no run, or two of one name; otherwise as of `run`.
    """
    if not runs:
        raise ValueError("there is nothing to compare: give at least one run")
    named = runs if isinstance(runs, Mapping) else _named(runs)
    return Comparison(
        {
            name: Result(replace(one.tables, name=name))
            if isinstance(one, Result)
            else run([*common, *one], name=name)
            for name, one in named.items()
        }
    )


def _named(runs: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """By the overrides that not all of them have."""
    shared = set(runs[0]).intersection(*runs)
    names = [" ".join(o for o in overrides if o not in shared) or "run" for overrides in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two runs are {twice[0]!r}: name them, {{'first': [...], ...}}")
    return dict(zip(names, runs, strict=True))
