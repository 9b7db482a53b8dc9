"""Who watches a run from outside: the protocol of the tracker axis.

A tracker is chosen by name (`tracker=tensorboard`, or a class of one's own,
`tracker=my_module:Mine`); when a run begins it hands out a `Watcher`. It is told figures and never
asked anything. What it does shows in no result: it is no part of what names a cell of a sweep.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from paxserve.metrics import Summary


class Watcher(Protocol):
    """One run's callbacks."""

    def on_figures(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        """How it goes, after a step.

        Args:
            step: its number.
            time_s: on the engine's clock.
            figures: by name; see `tracking.py`.
        """

    def on_end(self, summary: Summary | None) -> None:
        """The run has ended; None: it failed. Called once, whatever happens."""


class Tracker(Protocol):
    """Its fields are its settings; `every_s` is the least time between two calls of `on_figures`,
    in seconds of the engine's clock.
    """

    every_s: float

    def on_start(self, config: Mapping[str, Any], path: Path) -> Watcher:
        """A run begins.

        Args:
            config: as in config.yaml.
            path: its directory; a tracker's own files go into a directory there.

        Raises:
            ModuleNotFoundError: the tracker needs a package that is not installed.
        """
