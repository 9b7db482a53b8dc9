"""Pictures of a sweep: figures against its numeric axis, and paired differences.

Owns: how they are drawn. In: means and differences of a comparison. Out: pictures. Must not know:
how they come about.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from paxserve.report import style
from paxserve.report.style import Picture, legend_below, panels, title
from paxserve.sweep.comparison import Comparison, Difference, Mean, spread_name

_PANEL_INCHES = 3.2
_ASIDE_POINTS = 3
_SPANS = 15  # factor from which on an axis is logarithmic

type _Line = Mean | Difference


def draw_means(comparison: Comparison) -> Picture:
    """Each metric against the numeric axis, a line per policy, intervals over seeds."""
    rows = comparison.means()
    return _draw(comparison, rows, lambda metric: metric, sorted_policies(comparison))


def draw_differences(comparison: Comparison, rows: Sequence[Difference]) -> Picture:
    """Each metric's difference from the baseline; below zero, the policy's figure is lower."""
    others = [name for name in sorted_policies(comparison) if name != rows[0].baseline]
    picture = _draw(comparison, rows, lambda m: f"{m}, less {rows[0].baseline}", others)
    for axis in picture.axes:
        axis.axhline(0, color=style.BLACK, linewidth=0.8)
    return picture


def sorted_policies(comparison: Comparison) -> list[str]:
    """Their names, in the order in which they are drawn."""
    return list(comparison.policies.values())


def _draw(
    comparison: Comparison,
    rows: Sequence[_Line],
    heading: Callable[[str], str],
    names: Sequence[str],
) -> Picture:
    metrics = [metric for metric in comparison.metrics if any(r.metric == metric for r in rows)]
    columns = min(2, len(metrics))
    height = _PANEL_INCHES + 0.12 * len(names)
    picture, axes = panels([height] * -(-len(metrics) // columns), columns=columns)
    for spare in axes[len(metrics) :]:
        spare.remove()
    looks = dict(
        zip(names, zip(style.series_colours(len(names)), style.series_lines(len(names)),
                       style.MARKERS * len(names), strict=False), strict=True)
    )  # fmt: skip
    for axis, metric in zip(axes, metrics, strict=False):
        own = [row for row in rows if row.metric == metric]
        if comparison.by is None:
            _draw_points(axis, own, looks)
        else:
            _draw_lines(axis, own, looks, comparison.by)
        title(axis, heading(metric))
        axis.grid(color=style.GRID, linewidth=0.6)
    handles = [
        Line2D([], [], color=colour, ls=line, marker=marker, label=name)
        for name, (colour, line, marker) in looks.items()
    ]
    legend_below(picture, handles, columns=3 if len(names) > 4 else 2)
    counts = sorted({row.num_seeds for row in rows})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    spread = spread_name(counts)
    bars = f"; bars: {spread}" if spread else ""
    lost = comparison.num_missing
    missing = f"; {lost} of {comparison.num_cells} cells missing" if lost else ""
    picture.suptitle(f"means over {seeds} seeds{bars}{missing}", x=0.01, ha="left", fontsize=9)
    return picture


def _draw_lines(
    axis: Axes, rows: Sequence[_Line], looks: dict[str, tuple[str, str, str]], by: str
) -> None:
    """Each line a little to the side of the others, so that intervals can be told apart."""
    places = [_place(row) for row in rows]
    names = list(looks)
    for name, group in groupby(rows, key=lambda row: row.policy):
        own = list(group)
        colour, line, marker = looks[name]
        aside = _ASIDE_POINTS * (names.index(name) - (len(names) - 1) / 2)
        shift = ScaledTranslation(aside / 72, 0, axis.figure.dpi_scale_trans)
        moved = axis.transData + shift
        xs = [_place(row) for row in own]
        low = [row.mean if row.low is None else row.low for row in own]
        high = [row.mean if row.high is None else row.high for row in own]
        axis.plot(
            xs, [r.mean for r in own], line, marker=marker, ms=4, color=colour, transform=moved
        )
        axis.vlines(xs, low, high, color=colour, transform=moved)
        axis.update_datalim([*zip(xs, low, strict=True), *zip(xs, high, strict=True)])
    axis.autoscale_view()
    if min(places) > 0 and max(places) > _SPANS * min(places):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(by)
    _scale_heights(axis, rows)


def _place(row: _Line) -> float:
    assert row.by is not None
    return row.by


def _draw_points(axis: Axes, rows: Sequence[_Line], looks: dict[str, tuple[str, str, str]]) -> None:
    for place, row in enumerate(rows):
        colour, _, marker = looks[row.policy]
        axis.plot([place], [row.mean], marker, color=colour)
        if row.low is not None and row.high is not None:
            axis.vlines(place, row.low, row.high, color=colour)
    axis.set_xticks([])
    axis.set_xlim(-0.5, len(rows) - 0.5)
    _scale_heights(axis, rows)


def _scale_heights(axis: Axes, rows: Sequence[_Line]) -> None:
    """From zero, or by decades where figures span some; differences as they are."""
    if isinstance(rows[0], Difference):
        return
    values = [row.mean for row in rows]
    if min(values) > 0 and max(values) > _SPANS * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        axis.set_ylim(bottom=min(0.0, *values))
