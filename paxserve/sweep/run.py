"""A sweep from its cells to its table.

Owns: which cells run, what is said meanwhile, and the exit code. In: cells, a directory. Out: the
directory, filled. Must not know: Hydra.
"""

import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from paxserve.report.sweep_table import print_sweep
from paxserve.results import FAILURE
from paxserve.sweep.cell import Cell, axes_of, value_of
from paxserve.sweep.directory import State, SweepDirectory
from paxserve.sweep.lock import locked
from paxserve.sweep.runner import Ended, Runner
from paxserve.sweep.table import write_sweep_table
from paxserve.terminal import Terminal

_SHOWN_EVERY_S = 0.5


class Resume(StrEnum):
    """Which cells of an earlier sweep run again: none that has ended, those that failed, all."""

    MISSING = "missing"
    FAILED = "failed"
    ALL = "all"

    @property
    def states(self) -> tuple[State, ...]:
        """Cells in these states run."""
        more = {Resume.MISSING: (), Resume.FAILED: (State.FAILED,), Resume.ALL: tuple(State)}
        return (State.MISSING, *more[self])


def sweep(path: Path, cells: Sequence[Cell], *, resume: str, runner: Runner) -> int:
    """Run the cells that are to be run, then write the table of the whole directory.

    Args:
        path: the directory, new or of an earlier sweep.
        cells: what is asked for; equal ones run once.
        resume: as of `Resume`.
        runner: who runs them.

    Returns:
        0, or 1 if a cell has failed, now or before.

    Raises:
        ValueError: a setting that is none, a directory that holds something else, or another sweep
            at work there.
        KeyboardInterrupt: the sweep was interrupted; begun again, it goes on.
    """
    if resume not in tuple(Resume):
        raise ValueError(f"resume must be one of {', '.join(Resume)}, got {resume!r}")
    terminal = Terminal()
    directory = SweepDirectory.made(path)
    with locked(path, say=terminal.say) as lock:
        directory.tidy()
        directory.add(cells)
        asked = list({cell.name: cell for cell in cells}.values())
        states = {cell.name: directory.state(cell) for cell in asked}
        todo = [cell for cell in asked if states[cell.name] in Resume(resume).states]
        terminal.say(_plan(path, asked, states, todo))
        try:
            runner(directory, todo, lock, _Told(directory, todo, terminal))
        finally:
            terminal.close()
        table = write_sweep_table(directory)
    print_sweep(table)
    print(f"results: {path} (table.parquet, table.csv)")
    return _exit_code(directory, asked, terminal)


def _plan(path: Path, asked: Sequence[Cell], states: dict[str, State], todo: Sequence[Cell]) -> str:
    counts = [f"{list(states.values()).count(s)} {s}" for s in State if s in states.values()]
    return f"{path}: {len(asked)} cells ({', '.join(counts)}); {len(todo)} to run"


class _Told:
    """What is said of each cell that ends: of how many, what it was, how long the rest may take."""

    def __init__(self, directory: SweepDirectory, todo: Sequence[Cell], terminal: Terminal) -> None:
        self._directory, self._terminal, self._total = directory, terminal, len(todo)
        self._axes = axes_of(todo)
        self._num_done = self._num_failed = 0
        self._start_s = self._next_s = time.monotonic()

    def on_running(self, number: int) -> None:
        """See `Listener`."""
        if time.monotonic() >= self._next_s:
            self._show(number)

    def _show(self, num_running: int) -> None:
        self._next_s = time.monotonic() + _SHOWN_EVERY_S
        note = f"{self._num_failed} failed, {num_running} running"
        self._terminal.progress("cells", self._num_done, self._total, note=note)

    def on_ended(self, ended: Ended, num_running: int) -> None:
        """See `Listener`."""
        self._num_done += 1
        has_failed = ended.state is State.FAILED
        self._num_failed += has_failed
        left = self._total - self._num_done
        left_s = (time.monotonic() - self._start_s) / self._num_done * left
        named = " ".join(f"{key}={value_of(ended.cell.config, key)}" for key in self._axes)
        how = f"FAILED: {self._why(ended.cell)}" if has_failed else "done"
        rest = f"{left} left, about {left_s:.0f} s" if left else "the last"
        self._terminal.say(
            f"cell {self._num_done} of {self._total}, {ended.cell.name} {named}: {how} "
            f"({ended.seconds:.1f} s; {rest})"
        )
        self._show(num_running)

    def _why(self, cell: Cell) -> str:
        return first_line(self._directory.of(cell) / FAILURE)


def first_line(file: Path) -> str:
    """What went wrong, in a line."""
    return file.read_text(encoding="utf-8").partition("\n")[0]


def _exit_code(directory: SweepDirectory, asked: Sequence[Cell], terminal: Terminal) -> int:
    failed = [cell for cell in asked if directory.state(cell) is State.FAILED]
    if failed:
        terminal.say(
            f"{len(failed)} cells failed; see error.txt of {directory.of(failed[0])}"
            f"{' and others' if len(failed) > 1 else ''}; resume=failed runs them again"
        )
    return 1 if failed else 0
