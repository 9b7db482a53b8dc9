"""Pictures of latency: how it is distributed, and what throughput it comes with.

Owns: the distributions of TTFT and ITL, and throughput against latency. In: saved tables. Out:
pictures. Must not know: how latencies are defined (`metrics.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from paxserve.report import style
from paxserve.report.run_tables import MissingData, RunTables, labels
from paxserve.report.style import Picture, legend_below, panels, title

PERCENTILES = (50, 90, 99)
LATENCY = "mean_normalized_latency_s_per_token"
THROUGHPUT = "request_throughput"
_COMPLETED = ("stop", "length")
_INCHES_PER_RUN = 0.3  # a line under each panel, and half a line in the legend


def ttft_s(run: RunTables) -> np.ndarray:
    """Time to first token of the completed requests, sorted, in seconds."""
    requests = run.need("requests", "finish_reason", "ttft_s")
    completed = requests[requests["finish_reason"].isin(_COMPLETED)]
    return np.sort(completed["ttft_s"].dropna().to_numpy(np.float64))


def itl_s(run: RunTables) -> np.ndarray:
    """All gaps between tokens of the completed requests, sorted, in seconds."""
    requests = run.need("requests", "finish_reason", "itl_s")
    gaps = requests[requests["finish_reason"].isin(_COMPLETED)]["itl_s"]
    return np.sort(np.concatenate([np.zeros(0), *gaps]))


def draw_latency(runs: Sequence[RunTables]) -> Picture:
    """Share of TTFTs and of ITLs up to a latency, a line per run, its percentiles marked."""
    picture, (ttft, itl) = panels([4.4 + _INCHES_PER_RUN * len(runs)], columns=2)
    _draw_distributions(ttft, [ttft_s(run) for run in runs])
    _draw_distributions(itl, [itl_s(run) for run in runs])
    title(ttft, runs[0].title if len(runs) == 1 else "Time to first token")
    title(itl, "" if len(runs) == 1 else "Gap between tokens of a request")
    ttft.set_xlabel("time to first token (TTFT), s")
    itl.set_xlabel("gap between tokens (ITL), s")
    ttft.set_ylabel("share of completed requests, %")
    itl.set_ylabel("share of gaps, %")
    if len(runs) > 1:
        named = zip(_looks(len(runs)), labels(runs), strict=True)
        handles = [
            Line2D([], [], color=k.colour, ls=k.line, marker=k.marker, label=n) for k, n in named
        ]
        legend_below(picture, handles, columns=2)
    return picture


def draw_throughput(runs: Sequence[RunTables]) -> Picture:
    """Request throughput against normalized latency: a point per run, a line per set of policies.

    Raises:
        MissingData: no run has both figures.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    for run, policies in zip(runs, _series(runs), strict=True):
        x, y = run.summary.get(THROUGHPUT), run.summary.get(LATENCY)
        if x is not None and y is not None:
            series.setdefault(policies, []).append((x, y))
    if not series:
        raise MissingData(f"no summary.json of {[run.name for run in runs]} has {LATENCY}")
    picture, (axis,) = panels([4.8], width=7.5)
    for look, (name, points) in zip(_looks(len(series)), series.items(), strict=True):
        xs, ys = zip(*sorted(points, key=lambda point: point[1]), strict=True)
        axis.plot(xs, ys, look.line, marker=look.marker, color=look.colour, label=name)
    axis.set_xlabel("request throughput, requests/s")
    axis.set_ylabel("normalized latency, mean, s per output token")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(color=style.GRID, linewidth=0.6)
    legend_below(picture, axis.get_legend_handles_labels()[0], columns=2)
    title(axis, f"Throughput against latency, {len(runs)} runs")
    return picture


def _series(runs: Sequence[RunTables]) -> list[str]:
    """What the line of each run is called: its policies, those that are the same everywhere left
    out.
    """
    differing = {
        axis
        for axis in dict.fromkeys(axis for run in runs for axis in run.policies)
        if len({run.policies.get(axis) for run in runs}) > 1
    }
    return [
        ", ".join(v for axis, v in run.policies.items() if not differing or axis in differing)
        or "usual"
        for run in runs
    ]


def _draw_distributions(axis: Axes, samples: Sequence[np.ndarray]) -> None:
    for sample, look in zip(samples, _looks(len(samples)), strict=True):
        if not len(sample):
            axis.plot([], [], color=look.colour, label="none")
            continue
        marks = np.percentile(sample, PERCENTILES)
        figures = "  ".join(f"p{p} {_seconds(m)}" for p, m in zip(PERCENTILES, marks, strict=True))
        axis.ecdf(sample, color=look.colour, linestyle=look.line, linewidth=1.8)
        axis.plot(marks, np.array(PERCENTILES) / 100, look.marker, color=look.colour, label=figures)
    known = [sample for sample in samples if len(sample)]
    if known and _spans_decades(np.concatenate(known)):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    else:
        axis.set_xlim(0, 1.05 * max([sample[-1] for sample in known], default=1.0))
    axis.set_ylim(0, 1.02)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 0.99], ["0", "25", "50", "75", "90", "99"])
    axis.grid(color=style.GRID, linewidth=0.6)
    under = ScaledTranslation(-0.1, -0.45, axis.figure.dpi_scale_trans)  # below the axis's label
    axis.legend(
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axis.transAxes + under,
        frameon=False,
        fontsize=9,
    )


class _Look(NamedTuple):
    colour: str
    line: str
    marker: str


def _looks(number: int) -> list[_Look]:
    return [
        _Look(colour, line, style.MARKERS[i % len(style.MARKERS)])
        for i, (colour, line) in enumerate(
            zip(style.series_colours(number), style.series_lines(number), strict=True)
        )
    ]


def _spans_decades(values: np.ndarray) -> bool:
    return bool(values.min() > 0 and values.max() > 20 * values.min())


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
