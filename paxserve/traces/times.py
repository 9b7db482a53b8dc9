"""Arrival times as a trace records them.

Owns: that they count from the first one and never go back. In: seconds on any clock. Out: seconds
from the start. Must not know: how they are written.
"""

from paxserve.numbers import shown


class ArrivalTimes:
    """Reads times one after the other. Invariant: 0 <= each <= the next."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._last_written: object = None

    def arrival_s(self, name: str, time_s: float, written: object) -> float:
        """The next one, from the start; `name` and `written` are for the error.

        Raises:
            ValueError: it lies before the last one.
        """
        if self._first_s is None:
            self._first_s = time_s
        elif time_s < self._last_s:
            raise ValueError(
                f"{name} goes back: {shown(written)} comes after {shown(self._last_written)}"
            )
        self._last_s, self._last_written = time_s, written
        return time_s - self._first_s
