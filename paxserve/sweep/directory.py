"""The directory of a sweep: what is there, and how a cell comes to be there.

Owns: names in the directory, the state of a cell, and the one rename by which it appears. In: cells
and directories of runs. Out: states. Must not know: processes, what a run is.

    SWEEP/cells.jsonl               every cell that was ever asked for here
    SWEEP/<name>/                   a run that has ended: complete, or with error.txt
    SWEEP/<name>.running-<token>/   one that has not: nobody but its process writes there
    SWEEP/table.parquet, .csv       made from the above
    SWEEP/lock                      see `lock.py`
"""

import json
import secrets
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from paxserve import files
from paxserve.files import write_text
from paxserve.results import FAILURE, MARKER
from paxserve.sweep.cell import Cell
from paxserve.sweep.lock import LOCK

CELLS = "cells.jsonl"
_RUNNING = ".running-"


class State(StrEnum):
    """Of a cell. A failed one has left error.txt."""

    MISSING = "missing"
    FAILED = "failed"
    COMPLETE = "complete"


class SweepDirectory:
    """Invariant: SWEEP/<name>/ was renamed there when its run had ended, and is never written to
    afterwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def made(cls, path: Path) -> "SweepDirectory":
        """The directory of an earlier sweep, or a new one.

        Raises:
            ValueError: it holds something else.
        """
        if path.exists():
            found = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
            foreign = {name for name in found if name != LOCK and not name.startswith(CELLS)}
            if foreign and CELLS not in found:
                raise ValueError(
                    f"run_dir={path} is not empty and holds no sweep (no {CELLS}): choose another"
                )
        files.boundary("make", path)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def read(cls, path: Path) -> "SweepDirectory":
        """The directory of a sweep.

        Raises:
            ValueError: it is none.
        """
        if not (path / CELLS).is_file():
            raise ValueError(f"{path} holds no sweep (no {CELLS}): name a directory of run -m")
        return cls(path)

    def cells(self) -> list[Cell]:
        """Every cell that was asked for here, in the order in which they came."""
        file = self.path / CELLS
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [Cell.from_json(json.loads(line)) for line in lines]

    def add(self, cells: Iterable[Cell]) -> None:
        """Ask for more cells; those that are known stay as they are."""
        known = {cell.name: cell for cell in self.cells()}
        more = {cell.name: cell for cell in cells if cell.name not in known}
        if more:
            lines = [json.dumps(cell.to_json()) for cell in (known | more).values()]
            write_text(self.path / CELLS, "".join(f"{line}\n" for line in lines))

    def of(self, cell: Cell) -> Path:
        """Where a cell's files are when its run has ended."""
        return self.path / cell.name

    def state(self, cell: Cell) -> State:
        """Read from the disk."""
        path = self.of(cell)
        if (path / FAILURE).is_file():
            return State.FAILED
        return State.COMPLETE if (path / MARKER).is_file() else State.MISSING

    def run_of(self, cell: Cell) -> int | None:
        """Which run's directory is the cell's: another number after another run; None: missing."""
        path = self.of(cell)
        return path.stat().st_ino if path.is_dir() else None

    def begin(self, cell: Cell) -> Path:
        """A new directory for a run of the cell."""
        path = self.path / f"{cell.name}{_RUNNING}{secrets.token_hex(4)}"
        files.boundary("make", path)
        path.mkdir()
        return path

    def keep(self, cell_name: str, running: Path) -> None:
        """The run has ended: its directory becomes the cell's, in place of an older one."""
        files.replace_directory(running, self.path / cell_name)

    def tidy(self) -> None:
        """After a sweep that was ended: keep runs that had ended, remove what others left.

        Call it only while nothing runs here.
        """
        files.remove_temporaries(self.path)
        for running in sorted(self.path.glob(f"*{_RUNNING}*")):
            if (running / MARKER).is_file():
                self.keep(running.name.split(_RUNNING)[0], running)
            else:
                files.remove_directory(running)
