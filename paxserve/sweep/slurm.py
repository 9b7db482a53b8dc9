"""Cells run as jobs of a Slurm array, by submitit.

Owns: the jobs, and what remains of a cell whose job was lost. In: a sweep's directory, which all
machines see, and the cells to run. Out: their directories, each renamed there by its own job, so
that a later sweep finds those of one that was killed. Must not know: which cells are worth running.

A job that is still under way when its sweep was killed is not known to the next one: end the array
first (`scancel`), or wait for it.
"""

import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paxserve.files import write_text
from paxserve.results import FAILURE
from paxserve.sweep.cell import Cell
from paxserve.sweep.directory import SweepDirectory
from paxserve.sweep.processes import run_cell, terminated_like_interrupted
from paxserve.sweep.runner import Ended, Listener, Runner

_OF_SLURM = ("array_parallelism", "partition", "setup")
_POLL_S = 0.5


def array_of_jobs(cluster: str, resources: Mapping[str, Any]) -> Runner:
    """A runner that submits one array for all cells.

    Args:
        cluster: slurm, or local.
        resources: what each job gets, as in configs/hydra/launcher/slurm.yaml.

    Raises:
        ValueError: no such cluster.
        ModuleNotFoundError: submitit is not installed.
    """
    if cluster not in ("slurm", "local"):
        raise ValueError(f"hydra.launcher.cluster must be slurm or local, got {cluster!r}")
    try:
        submitit = importlib.import_module("submitit")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "hydra/launcher=slurm needs submitit: pip install 'paxserve[slurm]'"
        ) from error
    given = {
        f"slurm_{name}" if name in _OF_SLURM else name: value
        for name, value in resources.items()
        if value is not None and value != []
    }

    def run(
        directory: SweepDirectory, cells: Sequence[Cell], lock: int, listener: Listener
    ) -> None:
        if not cells:
            return
        executor = submitit.AutoExecutor(folder=directory.path / "submitit", cluster=cluster)
        executor.update_parameters(name="paxserve", **given)
        path = directory.path.resolve()
        before = {cell.name: directory.run_of(cell) for cell in cells}
        jobs = executor.map_array(_job, [path] * len(cells), [cell.to_json() for cell in cells])
        _wait(directory, list(zip(cells, jobs, strict=True)), before, listener)

    return run


def _wait(
    directory: SweepDirectory,
    jobs: list[tuple[Cell, Any]],
    before: Mapping[str, int | None],
    listener: Listener,
) -> None:
    start_s = time.monotonic()
    with terminated_like_interrupted():
        try:
            while jobs:
                listener.on_running(len(jobs))
                time.sleep(_POLL_S)
                for cell, job in [pair for pair in jobs if pair[1].done()]:
                    jobs.remove((cell, job))
                    error = job.exception()
                    if error is not None and directory.run_of(cell) == before[cell.name]:
                        _note_lost(directory, cell, error)
                    ended = Ended(cell, directory.state(cell), time.monotonic() - start_s)
                    listener.on_ended(ended, len(jobs))
        finally:
            for _, job in jobs:
                job.cancel(check=False)


def _note_lost(directory: SweepDirectory, cell: Cell, error: Exception) -> None:
    """The job ended without ending its cell: a lost machine, the time limit, an error of Slurm. A
    job that was lost after its cell had ended has left nothing to note.
    """
    path = directory.begin(cell)
    write_text(path / FAILURE, f"the job was lost\n\n{error}\n")
    directory.keep(cell.name, path)


def _job(path: Path, asked: Mapping[str, Any]) -> str:
    """What a machine of the cluster does."""
    return run_cell(SweepDirectory(path), Cell.from_json(asked)).value
