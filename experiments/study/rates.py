"""Latency against the rate of requests: a curve per system, its knee, and the picture.

Owns: how a curve is measured (the knee by search, a few points below it), and panels in which
measured curves stand beside published ones. In: overrides without a rate. Out: knees, pictures.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.lines import Line2D

from experiments.study.cells import Cells
from paxserve.claims.figure12 import LATENCY, at_rate
from paxserve.claims.knees import LEVEL_S, Knee, Point, find_knee
from paxserve.report import style
from paxserve.report.style import Picture, legend_below, panels, title

LOW_SHARES = (0.25, 0.5, 0.75)  # of the knee


class Curve(NamedTuple):
    """What is measured: `system` are overrides, but for rate and number of requests.

    start: where the search for the knee begins, requests/s. seconds: of arrivals. level_s: of the
    knee. shares: of the knee at which points are measured below it, with a third of the arrivals.
    """

    system: tuple[str, ...]
    start: float
    seconds: float
    cells: Cells
    level_s: float = LEVEL_S
    tolerance: float = 0.05
    shares: tuple[float, ...] = LOW_SHARES


def measured(curve: Curve) -> Knee:
    """The knee, and all points."""

    def latency_s(rate: float, seconds: float = curve.seconds) -> float:
        found = curve.cells.run([*curve.system, *at_rate(rate, seconds=seconds)])[LATENCY]
        assert found is not None
        return found

    knee = find_knee(latency_s, start=curve.start, level_s=curve.level_s, tolerance=curve.tolerance)
    low = [
        Point(rate, latency_s(rate, curve.seconds / 3))
        for rate in (share * knee.rate for share in curve.shares)
    ]
    return Knee(knee.rate, tuple(sorted((*low, *knee.points))))


class Panel(NamedTuple):
    """Of a picture: curves by system, measured and published; the rate's axis ends at `most`."""

    heading: str
    measured: Mapping[str, Sequence[Point]]
    published: Mapping[str, Sequence[Point]]
    most: float


def draw(shown: Sequence[Panel], *, level_s: float = LEVEL_S, columns: int = 3) -> Picture:
    """Normalized latency against the rate; solid lines are measured, dashed ones published."""
    columns = min(columns, len(shown))
    picture, axes = panels([3.0] * -(-len(shown) // columns), columns=columns)
    names = list(dict.fromkeys(name for panel in shown for name in panel.measured))
    colours = dict(zip(names, style.series_colours(len(names)), strict=True))
    for axis, panel in zip(axes, shown, strict=False):
        for curves, line, marker in ((panel.measured, "-", "o"), (panel.published, "--", "s")):
            for name, points in curves.items():
                axis.plot(
                    [point.rate for point in points],
                    [point.latency_s for point in points],
                    line,
                    marker=marker,
                    color=colours[name],
                    markerfacecolor=colours[name] if line == "-" else "white",
                    markersize=3.5,
                    linewidth=1.3,
                )
        axis.axhline(level_s, color=style.GRID, linewidth=0.8, zorder=0)
        axis.set_ylim(0, max(1.0, level_s))
        axis.set_xlim(0, panel.most)
        title(axis, panel.heading)
        axis.set_xlabel("requests/s")
        axis.set_ylabel("s per output token")
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    handles += [
        Line2D([], [], color=style.BLACK, marker="o", markersize=3.5, label="measured here"),
        Line2D([], [], color=style.BLACK, ls="--", marker="s", markersize=3.5,
               markerfacecolor="white", label="published"),
    ]  # fmt: skip
    legend_below(picture, handles, columns=7)
    return picture
