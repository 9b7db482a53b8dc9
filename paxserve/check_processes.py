"""Runs checks in processes of their own, several at once.

Owns: the processes. Each takes one check after the other and is made anew now and then, since
compilers keep what they build; a check that takes its process down, or longer than its deadline, as
a simulated barrier that waits forever does, has failed, and its process is ended. In: checks. Out:
an outcome each. Must not know: what a check does (`kernels_pallas/checks.py`).
"""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels_pallas.checks import Check, Outcome

CHECKS_PER_PROCESS = 32
DEADLINE_S = 300.0  # the slowest takes half a minute of a busy core


def _run_check(check: "Check") -> "Outcome":
    from kernels_pallas.checks import run_check

    return run_check(check)


type Act = Callable[["Check"], "Outcome"]


def run(
    chosen: "Sequence[Check]",
    *,
    num_jobs: int,
    deadline_s: float = DEADLINE_S,
    act: Act = _run_check,
) -> "Iterator[Outcome]":
    """As they end.

    Args:
        num_jobs: processes at once.
        deadline_s: of each check.
        act: what runs one, in the process; a function of a module.
    """
    waiting, busy, idle = deque(chosen), list[_Worker](), list[_Worker]()
    try:
        while waiting or busy:
            while waiting and len(busy) < num_jobs:
                worker = idle.pop() if idle else _Worker(act)
                busy.append(worker)
                worker.start(waiting.popleft(), deadline_s)
            left_s = min(worker.deadline_s for worker in busy) - time.monotonic()
            connection.wait([worker.pipe for worker in busy], max(0.0, left_s))
            for worker in list(busy):
                outcome = worker.outcome()
                if outcome is not None:
                    busy.remove(worker)
                    if worker.is_usable:
                        idle.append(worker)
                    else:
                        worker.end()
                    yield outcome
    finally:
        for worker in (*busy, *idle):
            worker.end()


class _Worker:
    """A process, and the check that it runs."""

    def __init__(self, act: Act) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, act), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen here
        self._check: Check | None = None
        self._started_s = self.deadline_s = 0.0
        self._num_left = CHECKS_PER_PROCESS
        self.is_usable = True

    def start(self, check: "Check", deadline_s: float) -> None:
        """Begin a check that may take so long."""
        self._check, self._num_left = check, self._num_left - 1
        self._started_s = time.monotonic()
        self.deadline_s = self._started_s + deadline_s
        with suppress(BrokenPipeError):  # it died while it was idle: `outcome` will see that
            self.pipe.send(check)

    def outcome(self) -> "Outcome | None":
        """What came of the check; None: nothing yet."""
        if self.pipe.poll():
            try:
                found: Outcome = self.pipe.recv()
            except (EOFError, ConnectionResetError):
                return self._failed("its process died")
            self.is_usable = self._num_left > 0
            return found
        if time.monotonic() >= self.deadline_s:
            return self._failed(f"timed out after {self.deadline_s - self._started_s:.0f} s")
        return None

    def _failed(self, detail: str) -> "Outcome":
        from kernels_pallas.checks import Outcome

        assert self._check is not None
        self.is_usable = False
        seconds = time.monotonic() - self._started_s
        return Outcome(check=self._check, verdict="FAILED", seconds=seconds, detail=detail)

    def end(self) -> None:
        """End the process, whatever it does."""
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: "connection.Connection", act: Act) -> None:
    while True:
        try:
            check = pipe.recv()
        except EOFError:
            return
        pipe.send(act(check))
