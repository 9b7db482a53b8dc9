"""Figure 12 again: normalized latency against the request rate, published beside measured."""

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D

from paxserve.claims.figure12 import SYSTEMS, Panel
from paxserve.claims.knees import LEVEL_S, Knee, Point
from paxserve.report import style
from paxserve.report.style import Picture, legend_below, panels, title

_COLOURS = dict(zip(SYSTEMS, style.series_colours(len(SYSTEMS)), strict=True))
_TOP_S = 1.0  # where the paper cuts its axis


def draw(
    shown: Sequence[Panel],
    knees: Mapping[tuple[str, str], Knee],
    published: Mapping[tuple[str, str], Sequence[Point]],
) -> Picture:
    """A panel each; solid lines are measured, dashed ones published."""
    columns = min(3, len(shown))
    picture, axes = panels([3.0] * -(-len(shown) // columns), columns=columns)
    for axis, panel in zip(axes, shown, strict=False):
        for name, colour in _COLOURS.items():
            found = knees.get((panel.letter, name))
            for points, line, marker, filled in (
                (found.points if found else (), "-", "o", colour),
                (published[panel.letter, name], "--", "s", "white"),
            ):
                axis.plot(
                    [point.rate for point in points],
                    [point.latency_s for point in points],
                    line,
                    marker=marker,
                    color=colour,
                    markerfacecolor=filled,
                    markersize=3.5,
                    linewidth=1.3,
                )
        axis.axhline(LEVEL_S, color=style.GRID, linewidth=0.8, zorder=0)
        axis.set_ylim(0, _TOP_S)
        axis.set_xlim(0, 1.25 * max(panel.knees.values()))
        title(axis, f"{panel.letter}: {panel.title}")
        axis.set_xlabel("requests/s")
        axis.set_ylabel("s per output token")
    handles = [Line2D([], [], color=colour, label=name) for name, colour in _COLOURS.items()]
    handles += [
        Line2D([], [], color=style.BLACK, marker="o", markersize=3.5, label="measured here"),
        Line2D([], [], color=style.BLACK, ls="--", marker="s", markersize=3.5,
               markerfacecolor="white", label="published (digitised)"),
    ]  # fmt: skip
    legend_below(picture, handles, columns=7)
    return picture
