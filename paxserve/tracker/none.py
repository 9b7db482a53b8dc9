"""Nobody watches, which is the usual case."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paxserve.metrics import Summary


@dataclass(frozen=True, slots=True)
class NoTracker:
    """The usual one."""

    every_s = math.inf

    def on_start(self, config: Mapping[str, Any], path: Path) -> "NoTracker":
        """See `Tracker`."""
        return self

    def on_figures(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        """See `Watcher`."""

    def on_end(self, summary: Summary | None) -> None:
        """See `Watcher`."""
