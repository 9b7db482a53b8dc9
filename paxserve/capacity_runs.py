"""What a rate gives, measured by a run of its own.

Owns: the runs of a capacity search: where they lie, that none is made twice, and the figures that
are taken from one. In: overrides, a rate. Out: figures. Must not know: the search.

The directory is that of a sweep over `workload.arrivals.rate` whose cells are asked for one after
the other; so an ended search goes on, a second SLO costs only the rates that it asks for anew, and
`experiments/compare.py` draws it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from paxserve import experiment
from paxserve.capacity import GROWTH, Capacity, Probe, search
from paxserve.experiment import Progress, Run, nothing_completed
from paxserve.files import remove_directory
from paxserve.hydra_config import Composed, compose_config, key_of
from paxserve.metrics import Summary
from paxserve.notices import Say
from paxserve.results import write_results
from paxserve.service_level import FIELDS, RequestBounds, Slo, queue_growth
from paxserve.sweep.cell import Cell
from paxserve.sweep.directory import State, SweepDirectory
from paxserve.sweep.lock import locked
from paxserve.sweep.table import write_sweep_table
from paxserve.tables import numpy_column

RATE_KEY = "workload.arrivals.rate"


def find_capacity(
    overrides: Sequence[str],
    slo: Slo,
    *,
    out: Path,
    say: Say,
    progress: Progress,
    on_probe: Callable[[Probe], None] = lambda probe: None,
    tolerance: float = 0.02,
    start: float = 1.0,
    lowest: float | None = None,
    highest: float | None = None,
) -> Capacity:
    """Search the highest rate, with a run per probe in this process.

    Args:
        overrides: as of `paxserve run`, but for the rate; with one seed, so that all probes have
            the same requests.
        slo: what is to be met.
        out: the directory, new or of an earlier search.
        say, progress: as of `experiment.run`.
        on_probe, tolerance, start, lowest, highest: as of `search`.

    Raises:
        ValueError: as of `search` or of a run; or the workload has no rate.
    """
    if RATE_KEY in map(key_of, overrides):
        raise ValueError(f"{RATE_KEY} is what is searched for: leave it out")
    composed = _composed(overrides)
    directory = SweepDirectory.made(out)
    with locked(out, say=say):
        directory.tidy()
        runs = _Runs(directory, overrides, composed, slo.per_request, say, progress)
        found = search(
            runs.measure,
            slo,
            tolerance=tolerance,
            start=start,
            lowest=lowest,
            highest=highest,
            on_probe=on_probe,
        )
        write_sweep_table(directory)
    return found


class _Runs:
    def __init__(
        self,
        directory: SweepDirectory,
        overrides: Sequence[str],
        composed: Composed,
        per_request: RequestBounds,
        say: Say,
        progress: Progress,
    ) -> None:
        self._directory, self._overrides, self._per_request = directory, overrides, per_request
        self._config, self._choices, self._explicit = composed
        self._say, self._progress = say, progress

    def measure(self, rate: float) -> Summary:
        """The figures of a run at this rate, read from its files: made now if they are not there.

        Raises:
            ValueError: as of `experiment.run`, or no request was completed.
        """
        asked = (*self._overrides, f"{RATE_KEY}={rate}")
        config = {"choices": self._choices, **_with_rate(self._config, rate)}
        keys = tuple(key for key in map(key_of, asked) if not key.startswith("hydra."))
        cell = Cell(overrides=asked, keys=keys, config=config)
        if self._directory.state(cell) is not State.COMPLETE:
            self._run(cell)
        return figures_of(self._directory.of(cell), self._per_request)

    def _run(self, cell: Cell) -> None:
        self._directory.add([cell])
        running = self._directory.begin(cell)
        try:
            done = experiment.run(
                cell.config,
                choices=self._choices,
                explicit=self._explicit,
                say=self._say,
                progress=self._progress,
            )
            _check_completed(done)
            write_results(done, running, config=cell.config)
            self._directory.keep(cell.name, running)
        finally:
            remove_directory(running)


def figures_of(run: Path, per_request: RequestBounds) -> Summary:
    """The summary of a saved run, its goodput if there are bounds, and the growth of its queue."""
    summary: Summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    table = pq.read_table(run / "requests.parquet", columns=list(FIELDS))
    requests = {name: numpy_column(table[name]) for name in FIELDS}
    num_sent = len(table) + int(summary["num_refused"] or 0)
    goodput = per_request.goodput(
        requests, num_sent=num_sent, duration_s=float(summary["duration"] or 0)
    )
    return {**summary, **goodput, GROWTH: queue_growth(requests)}


def _composed(overrides: Sequence[str]) -> Composed:
    """With some rate: composing takes longer than many a run."""
    try:
        return compose_config([*overrides, f"{RATE_KEY}=1.0"])
    except ValueError as error:
        if RATE_KEY not in str(error):
            raise
        raise ValueError(
            f"this workload has no {RATE_KEY}: choose workload/arrivals=poisson or gamma, and a "
            "workload that has arrivals"
        ) from error


def _with_rate(config: dict[str, Any], rate: float) -> dict[str, Any]:
    workload = config["workload"]
    return {**config, "workload": {**workload, "arrivals": {**workload["arrivals"], "rate": rate}}}


def _check_completed(done: Run) -> None:
    if (nothing := nothing_completed(done)) is not None:
        raise ValueError(str(nothing))
