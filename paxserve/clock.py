"""Time, injected: the wall for real runs, a number for tests and simulation, a tape for replays.

Owns: the clocks. Everything else that needs the time is handed one, or a value in seconds.
"""

import time
from collections.abc import Sequence
from math import inf
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
        if not 0 <= duration_s < inf:  # NaN is neither, and nothing would be later than it
            raise ValueError(f"time cannot go back, or end: duration_s={duration_s}")
        self._now_s += duration_s

    def wait_until(self, time_s: float) -> None:
        """Jump there, if it lies ahead."""
        self._now_s = max(self._now_s, time_s)


class RecordingClock:
    """Another clock, which remembers in `readings_s` every time that it told, in order."""

    def __init__(self, clock: Clock) -> None:
        self.readings_s: list[float] = []
        self._clock = clock

    def now_s(self) -> float:
        """The other clock's time."""
        self.readings_s.append(self._clock.now_s())
        return self.readings_s[-1]

    def spend(self, duration_s: float) -> None:
        """See `Clock.spend`."""
        self._clock.spend(duration_s)

    def wait_until(self, time_s: float) -> None:
        """See `Clock.wait_until`."""
        self._clock.wait_until(time_s)


class RecordedClock:
    """Tells recorded times once more. An engine sees time only by asking for it, so one that
    decides the same asks as often as the recorded one, and is told of every delay there was.
    """

    def __init__(self, readings_s: Sequence[float]) -> None:
        self._readings_s = readings_s
        self.num_told = 0

    def now_s(self) -> float:
        """The next recorded time.

        Raises:
            RuntimeError: there is none left: this run went another way than the recorded one.
        """
        if self.num_told == len(self._readings_s):
            raise RuntimeError(
                f"the recorded run asked for the time {self.num_told} times, this one asks again: "
                "it has decided otherwise"
            )
        self.num_told += 1
        return self._readings_s[self.num_told - 1]

    def spend(self, duration_s: float) -> None:
        """Nothing to do: it is in the recorded times."""

    def wait_until(self, time_s: float) -> None:
        """Nothing to do: it is in the recorded times."""
