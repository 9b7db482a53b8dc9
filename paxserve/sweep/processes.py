"""Cells run, each in a process of its own.

Owns: the processes, and what remains of a cell whose process was ended. In: a sweep's directory and
the cells to run. Out: their directories. Must not know: which cells are worth running.
"""

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paxserve.files import remove_directory, write_text
from paxserve.numbers import whole
from paxserve.results import FAILURE, LOG, MARKER
from paxserve.sweep.cell import Cell
from paxserve.sweep.directory import State, SweepDirectory
from paxserve.sweep.runner import Ended, Listener, Runner

COMMAND = (sys.executable, "-m", "paxserve.sweep.child")
MOST_JOBS = 1024
_POLL_S = 0.05
_PATIENCE_S = 10.0  # between asking a process to end and ending it
_MOST_OF_LOG = 8000  # characters of it in error.txt, where the run could not write its own


@dataclass(slots=True)
class _Run:
    cell: Cell
    path: Path
    process: "subprocess.Popen[bytes]"
    start_s: float = field(default_factory=time.monotonic)


def processes(num_jobs: Any) -> Runner:
    """A runner that has at most `num_jobs` processes at a time.

    Raises:
        ValueError: no such number.
    """
    most = whole("n_jobs", num_jobs, low=1, high=MOST_JOBS)

    def run(
        directory: SweepDirectory, cells: Sequence[Cell], lock: int, listener: Listener
    ) -> None:
        waiting, running = deque(cells), list[_Run]()
        with terminated_like_interrupted():
            try:
                while waiting or running:
                    while waiting and len(running) < most:
                        running.append(_start(directory, waiting.popleft(), lock))
                    listener.on_running(len(running))
                    time.sleep(_POLL_S)
                    for one in [one for one in running if one.process.poll() is not None]:
                        running.remove(one)
                        listener.on_ended(_finish(directory, one), len(running))
            finally:
                _end(running)

    return run


def run_cell(directory: SweepDirectory, cell: Cell) -> State:
    """Run one cell in a process of its own and wait for it: what a job of a cluster does."""
    with terminated_like_interrupted():
        run = _start(directory, cell, None)
        try:
            run.process.wait()
            return _finish(directory, run).state
        finally:
            _end([run])


def _start(directory: SweepDirectory, cell: Cell, lock: int | None) -> _Run:
    path = directory.begin(cell)
    with (path / LOG).open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, str(path), *cell.overrides, f"run_dir={_quoted(directory.of(cell))}"],
            stdin=subprocess.PIPE,  # see `child.py`
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,  # so that Ctrl-C comes to us alone, who end the others
        )
    return _Run(cell, path, process)


def _quoted(path: Path) -> str:
    """As a value that Hydra takes for what it is."""
    return "'" + str(path).replace("'", "\\'") + "'"


def _finish(directory: SweepDirectory, run: _Run) -> Ended:
    code = run.process.returncode
    assert run.process.stdin is not None
    run.process.stdin.close()
    is_noted = (run.path / FAILURE).is_file()
    if not is_noted and (code != 0 or not (run.path / MARKER).is_file()):
        write_text(run.path / FAILURE, f"{_end_of(code)}\n\n{_last_words(run.path / LOG)}")
    directory.keep(run.cell.name, run.path)
    return Ended(run.cell, directory.state(run.cell), time.monotonic() - run.start_s)


def _end_of(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}; its last words:"
    return f"the process was ended by {signal.Signals(-code).name}; its last words:"


def _last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_MOST_OF_LOG:]


def _end(running: Sequence[_Run]) -> None:
    """End our own processes, and take away what they had written."""
    for run in running:
        run.process.terminate()
    last_s = time.monotonic() + _PATIENCE_S
    for run in running:
        try:
            run.process.wait(max(0.0, last_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()
        assert run.process.stdin is not None
        run.process.stdin.close()
        remove_directory(run.path)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which batch systems send, is taken like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
