"""Time, injected: the wall for real runs, a number for tests and simulation.

Owns: the two clocks. Everything else that needs the time is handed one, or a value in seconds.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the clock was made."""

    def now_s(self) -> float:
        """The time."""

    def spend(self, duration_s: float) -> None:
        """A step said that it took this long."""

    def wait_until(self, time_s: float) -> None:
        """Return when `now_s() >= time_s`."""


class WallClock:
    """Real time; a step has already taken the time that it reports."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since this clock was made."""
        return time.perf_counter() - self._start

    def spend(self, duration_s: float) -> None:
        """Nothing to do: the wall has moved by itself."""

    def wait_until(self, time_s: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, time_s - self.now_s()))


class VirtualClock:
    """Time that moves only when told to; invariant: it never goes back."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """The virtual time."""
        return self._now_s

    def spend(self, duration_s: float) -> None:
        """Move on by `duration_s` >= 0."""
        if duration_s < 0:
            raise ValueError(f"time cannot go back: duration_s={duration_s}")
        self._now_s += duration_s

    def wait_until(self, time_s: float) -> None:
        """Jump there, if it lies ahead."""
        self._now_s = max(self._now_s, time_s)
