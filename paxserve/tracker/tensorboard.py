"""Curves for TensorBoard, in the run's directory: `tensorboard --logdir runs`.

Times are those of the engine's clock, also where it is virtual.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paxserve.metrics import Summary
from paxserve.numbers import MOST_S, real

_WRITER = "tensorboardX"


@dataclass(frozen=True, slots=True)
class TensorBoard:
    """Needs the extra `tensorboard`, which brings a writer and not TensorBoard itself."""

    every_s: float = 1.0

    def __post_init__(self) -> None:
        """Check the field."""
        real("every_s", self.every_s, high=MOST_S)

    def on_start(self, config: Mapping[str, Any], path: Path) -> "_Curves":
        """See `Tracker`."""
        try:
            module = importlib.import_module(_WRITER)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"tracker=tensorboard needs {_WRITER}: pip install 'paxserve[tensorboard]'"
            ) from error
        writer = module.SummaryWriter(logdir=str(path / "tensorboard"))
        text = json.dumps(config, indent=1, default=repr)
        writer.add_text("config", f"```\n{text}\n```", global_step=0)
        return _Curves(writer)


class _Curves:
    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._last = 0, 0.0

    def on_figures(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        """See `Watcher`."""
        self._last = step, time_s
        for name, value in figures.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=time_s)

    def on_end(self, summary: Summary | None) -> None:
        """See `Watcher`."""
        step, time_s = self._last
        for name, value in (summary or {}).items():
            if value is not None:
                self._writer.add_scalar(f"summary/{name}", value, global_step=step, walltime=time_s)
        self._writer.close()
