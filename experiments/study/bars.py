"""Bars, published beside measured: stacked parts, and groups of single ones."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments.study.readme import written
from paxserve.report import style
from paxserve.report.style import Picture, legend_below, panels, title

_LEAST_LABELLED = 4.0


def stacked(
    bars: Mapping[str, Sequence[float]], parts: Mapping[str, str], *, heading: str, unit: str
) -> Picture:
    """A bar per name, its parts from the left; `parts` are labels and their colours."""
    picture, (axis,) = panels([1.4 + 0.36 * len(bars)], width=8.5)
    for y, values in enumerate(bars.values()):
        left = 0.0
        for value, colour in zip(values, parts.values(), strict=True):
            axis.barh(y, value, left=left, color=colour, height=0.72, edgecolor="white")
            if value >= _LEAST_LABELLED:
                axis.text(left + value / 2, y, f"{value:.1f}", ha="center", va="center", fontsize=8)
            left += value
    axis.set_yticks(range(len(bars)), list(bars))
    axis.set_ylim(len(bars) - 0.5, -0.5)
    axis.set_xlabel(unit)
    axis.spines["left"].set_visible(False)
    axis.tick_params(left=False)
    title(axis, heading)
    handles = [Patch(color=colour, label=label) for label, colour in parts.items()]
    legend_below(picture, handles, columns=4)
    return picture


def grouped(
    groups: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]],
    *,
    unit: str,
    columns: int = 2,
    are_ratios: bool = False,
) -> Picture:
    """A panel per group: its title, and per series the values by name. Bars of ratios grow from 1
    on a logarithmic axis, so that half is as far as twice.
    """
    picture, axes = panels([3.0] * -(-len(groups) // columns), columns=columns)
    names: list[str] = []
    for axis, (heading, series) in zip(axes, groups, strict=False):
        names = list(dict.fromkeys([*names, *series]))
        if are_ratios:
            axis.set_yscale("log")
            axis.axhline(1.0, color=style.GRID, linewidth=0.8, zorder=0)
            axis.margins(y=0.15)
        _draw_group(axis, series, names, bottom=float(are_ratios))
        title(axis, heading)
        axis.set_ylabel(unit)
    colours = style.series_colours(len(names))
    handles = [Patch(color=c, label=name) for c, name in zip(colours, names, strict=True)]
    legend_below(picture, handles, columns=4)
    return picture


def _draw_group(
    axis: Axes, series: Mapping[str, Mapping[str, float]], names: Sequence[str], *, bottom: float
) -> None:
    labels = list(next(iter(series.values())))
    width = 0.8 / len(series)
    colours = dict(zip(names, style.series_colours(len(names)), strict=True))
    for i, (name, values) in enumerate(series.items()):
        for x, label in enumerate(labels):
            if label not in values:
                continue
            place = x + (i - (len(series) - 1) / 2) * width
            value, colour = values[label], colours[name]
            axis.bar(place, value - bottom, bottom=bottom, width=width * 0.94, color=colour)
            side = "top" if value < bottom else "bottom"
            axis.text(place, value, written(value, digits=2), ha="center", va=side, fontsize=7.5)
    axis.set_xticks(range(len(labels)), labels)
