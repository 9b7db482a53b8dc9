"""What a tracker is told, and when.

Owns: the figures, and the pace. In: the choice of a tracker, an engine after each step. Out: calls.
Must not know: what becomes of them.

| figure | |
|---|---|
| num_running, num_waiting | requests |
| num_ended | requests, since the start |
| kv_used_share | blocks that somebody holds, of the usable ones |
| step_time_ms | of the last step |
| tokens_per_s | computed tokens per second of step time, since the last call |
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paxserve.compose import load
from paxserve.engine import Engine
from paxserve.metrics import Summary
from paxserve.tracker import Tracker

TRACKER = "tracker"


class Tracking:
    """One run under one tracker."""

    def __init__(self, tracker: Tracker, config: Mapping[str, Any], path: Path) -> None:
        self._every_s, self._next_s = tracker.every_s, 0.0
        self._watcher = tracker.on_start(config, path)
        self._num_seen = 0
        self._has_ended = False

    @classmethod
    def of(cls, config: Mapping[str, Any], path: Path) -> "Tracking":
        """By the tracker that was chosen.

        Args:
            config: with a key `choices`, as in config.yaml.
            path: the run's directory.

        Raises:
            ValueError: as of `compose.load`.
            ModuleNotFoundError: as of `Tracker.on_start`.
        """
        tracker: Tracker = load(TRACKER, config["choices"][TRACKER], config.get(TRACKER))
        return cls(tracker, config, path)

    def after_step(self, engine: Engine, num_ended: int) -> None:
        """Tell the tracker, if it is time."""
        if len(engine.steps) == self._num_seen or engine.clock.now_s() < self._next_s:
            return
        last = engine.steps[-1]
        time_s = last.start_s + last.duration_s
        new = engine.steps[self._num_seen :]
        busy_s = sum(step.duration_s for step in new)
        figures = {
            "num_running": float(last.num_running),
            "num_waiting": float(last.num_waiting),
            "num_ended": float(num_ended),
            "kv_used_share": last.num_used_blocks / (engine.limits.num_blocks - 1),
            "step_time_ms": 1000 * last.duration_s,
        }
        if busy_s > 0:
            figures["tokens_per_s"] = sum(step.num_tokens for step in new) / busy_s
        self._num_seen = len(engine.steps)
        self._next_s = time_s + self._every_s
        self._watcher.on_figures(last.step_id, time_s, figures)

    def end(self, summary: Summary | None) -> None:
        """The run is over, with a summary or without; only the first call counts."""
        if not self._has_ended:
            self._has_ended = True
            self._watcher.on_end(summary)
