"""The rate at which a latency that rises with it passes a level: the knee of a curve.

Owns: the search, and what is read off a curve of points. In: a function of the rate. Out: a rate
and every point that was measured. Must not know: what is simulated.

Source of the level: at 0.2 s per output token the published curves of Kwon et al. (SOSP'23), Figure
12, give the ratios that their text names.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, log
from typing import NamedTuple

LEVEL_S = 0.2
_STRIDE = 1.35
_MOST_STRIDES = 12


class Point(NamedTuple):
    """Latency in s per token at a rate in requests per s."""

    rate: float
    latency_s: float


class Knee(NamedTuple):
    """Where the level is passed, and all points measured on the way, by rate."""

    rate: float
    points: tuple[Point, ...]


def find_knee(
    latency_s: Callable[[float], float],
    *,
    start: float,
    level_s: float = LEVEL_S,
    tolerance: float = 0.05,
) -> Knee:
    """Search outwards from `start`, then between the two rates that enclose the level.

    Args:
        latency_s: measures at a rate; rises with it.
        start: where to look first, in requests per s.
        level_s: what is passed.
        tolerance: the enclosing rates are at most this share apart; between them the knee is
            interpolated.

    Raises:
        RuntimeError: the level is not passed between start / 36 and start * 36.
    """
    points = {start: latency_s(start)}

    def measure(rate: float) -> bool:
        points[rate] = latency_s(rate)
        return points[rate] > level_s

    is_above = points[start] > level_s
    low = high = start
    for _ in range(_MOST_STRIDES):
        if is_above:
            high, low = low, low / _STRIDE
            if not measure(low):
                break
        else:
            low, high = high, high * _STRIDE
            if measure(high):
                break
    else:
        raise RuntimeError(f"{level_s} s per token is passed nowhere near {start} requests/s")
    while high > (1 + tolerance) * low:
        middle = (low * high) ** 0.5
        if measure(middle):
            high = middle
        else:
            low = middle
    curve = tuple(Point(*pair) for pair in sorted(points.items()))
    pair = (Point(low, points[low]), Point(high, points[high]))
    return Knee(_between(*pair, level_s), curve)


def crossing(curve: Sequence[Point], level_s: float = LEVEL_S) -> float | None:
    """Where a curve passes the level first, interpolated; None if it does not."""
    ordered = sorted(curve)
    for low, high in pairwise(ordered):
        if low.latency_s <= level_s < high.latency_s:
            return _between(low, high, level_s)
    return None


def _between(low: Point, high: Point, level_s: float) -> float:
    """Linear in the logarithm of the latency, which near saturation spans decades."""
    share = log(level_s / low.latency_s) / log(high.latency_s / low.latency_s)
    return exp(log(low.rate) + share * log(high.rate / low.rate))
