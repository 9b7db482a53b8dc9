"""Bars, published beside measured: stacked parts, and groups of single ones."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

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
    is_logarithmic: bool = False,
) -> Picture:
    """A panel per group: its title, and per series the values by name."""
    picture, axes = panels([3.0] * -(-len(groups) // columns), columns=columns)
    names: list[str] = []
    for axis, (heading, series) in zip(axes, groups, strict=False):
        names = list(dict.fromkeys([*names, *series]))
        _draw_group(axis, series, names)
        title(axis, heading)
        axis.set_ylabel(unit)
        if is_logarithmic:
            axis.set_yscale("log")
    colours = style.series_colours(len(names))
    handles = [Patch(color=c, label=name) for c, name in zip(colours, names, strict=True)]
    legend_below(picture, handles, columns=4)
    return picture


def _draw_group(
    axis: Axes, series: Mapping[str, Mapping[str, float]], names: Sequence[str]
) -> None:
    labels = list(next(iter(series.values())))
    width = 0.8 / len(series)
    colours = dict(zip(names, style.series_colours(len(names)), strict=True))
    for i, (name, values) in enumerate(series.items()):
        for x, label in enumerate(labels):
            if label not in values:
                continue
            place = x + (i - (len(series) - 1) / 2) * width
            axis.bar(place, values[label], width=width * 0.94, color=colours[name])
            axis.text(place, values[label], f"{values[label]:.3g}", ha="center", va="bottom",
                      fontsize=7.5)  # fmt: skip
    axis.set_xticks(range(len(labels)), labels)
