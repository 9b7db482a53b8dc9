"""Who runs the cells of a sweep: the protocol.

A runner is given a directory and the cells to run. Each cell ends up as its directory, whatever
becomes of it: a runner does not return before, nor raise for a cell that fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paxserve.sweep.cell import Cell
from paxserve.sweep.directory import State, SweepDirectory


@dataclass(frozen=True, slots=True)
class Ended:
    """A cell that is no longer running, and the seconds since it began."""

    cell: Cell
    state: State
    seconds: float


class Listener(Protocol):
    """Is told how it goes."""

    def on_running(self, number: int) -> None:
        """So many cells run; said again and again."""

    def on_ended(self, ended: Ended, num_running: int) -> None:
        """A cell has ended, and so many still run."""


class Runner(Protocol):
    """See the module."""

    def __call__(
        self, directory: SweepDirectory, cells: Sequence[Cell], lock: int, listener: Listener
    ) -> None:
        """Run cells to the end of all.

        Args:
            directory: where they belong.
            cells: in the order in which they begin.
            lock: of the sweep; processes on this machine hold it with us.
            listener: told of each that ends, and meanwhile.

        Raises:
            KeyboardInterrupt: interrupted, also by SIGTERM. Whatever ran was ended, and nothing is
                left of it.
        """
