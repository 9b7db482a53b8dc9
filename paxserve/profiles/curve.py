"""Seconds over a count, as straight lines between measured points.

Owns: what lies between, below and above the points. In: points, several of one count or not. Out:
seconds. Must not know: files, what is counted.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from statistics import median


class Curve:
    """Below the first point it is level, since no step is shorter than the smallest measured; above
    the last it ends.

    Args:
        what: is counted, for the error.
        points: (count, seconds); of one count the median is taken.

    Raises:
        ValueError: there is no point.
    """

    def __init__(self, what: str, points: Iterable[tuple[float, float]]) -> None:
        seconds_of: dict[float, list[float]] = defaultdict(list)
        for count, seconds in points:
            seconds_of[count].append(seconds)
        if not seconds_of:
            raise ValueError(f"{what}: nothing was measured")
        self._what = what
        self._counts = sorted(seconds_of)
        self._seconds = [median(seconds_of[count]) for count in self._counts]

    def at(self, count: float) -> float:
        """Seconds of a count.

        Raises:
            ValueError: it lies above the last point.
        """
        counts, seconds = self._counts, self._seconds
        place = bisect_left(counts, count)
        if place == len(counts):
            raise ValueError(
                f"{self._what}: measured from {counts[0]:g} to {counts[-1]:g}, and a step has "
                f"{count:g}: lower the limits of the engine, or take another cost_model"
            )
        if place == 0 or counts[place] == count:
            return seconds[place]
        share = (count - counts[place - 1]) / (counts[place] - counts[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])
