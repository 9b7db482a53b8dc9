"""Orca's Figure 10 with 175B: iteration-level against request-level batching.

python -m experiments.orca_fig10.run [--processes 2] [--fast]
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from experiments.study.cells import Cells, each
from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, ratio, table
from paxserve.claims.knees import Knee, Point
from paxserve.claims.orca import (
    FITTED_HOST_S,
    IDLE_S,
    LEVEL_S,
    PUBLISHED,
    SYSTEMS,
    cell,
    fitted_host_s,
    knee_of,
    median_latency_s,
)
from paxserve.report import style
from paxserve.report.style import Picture, panels, title

_SHARES = (0.05, 0.3, 0.6)  # of the knee: points at low load


class Task(NamedTuple):
    """A curve to be measured."""

    system: str
    num_requests: int
    host_s: float
    shares: tuple[float, ...]
    cells: Cells


def measured(task: Task) -> Knee:
    """The knee, with points at low load in its curve."""
    measure = partial(task.cells.kept, median_latency_s)
    found = knee_of(
        task.system, num_requests=task.num_requests, host_s=task.host_s, measure=measure
    )
    low = [
        Point(rate, measure(cell(SYSTEMS[task.system], rate=rate, num_requests=task.num_requests,
                                 host_s=task.host_s)))
        for rate in (share * found.rate for share in task.shares)
    ]  # fmt: skip
    return Knee(found.rate, tuple(sorted((*low, *found.points))))


def study(setting: Setting) -> Findings:
    """Orca, and request-level batching at its two settings."""
    is_fast = setting.scale.fast
    host_s = FITTED_HOST_S
    if not is_fast:
        host_s = fitted_host_s(measure=partial(setting.cells.kept, median_latency_s))
    tasks = [
        Task(name, setting.scale.of(1200, 200), host_s, () if is_fast else _SHARES, setting.cells)
        for name in SYSTEMS
    ]
    found = each(measured, tasks, num_processes=setting.num_processes, what="knees")
    knees = dict(zip(SYSTEMS, found, strict=True))
    tables = {"verdict": verdict(knees), "knees": knee_table(knees, host_s)}
    return Findings(tables, {"curves": draw(knees)})


def verdict(knees: Mapping[str, Knee]) -> str:
    """Whether the multiple is within a factor of two of the paper's."""
    times = knees["Orca, 128"].rate / best(knees)
    holds = 36.9 / 2 <= times <= 36.9 * 2
    return (
        f"{mark(holds)}Orca sustains {times:.1f} times the rate "
        f"of request-level batching, 36.9 times in the paper (tolerance: a factor of two)."
    )


def best(knees: Mapping[str, Knee]) -> float:
    """The rate of request-level batching at the better of its settings."""
    return max(knee.rate for name, knee in knees.items() if name != "Orca, 128")


def knee_table(knees: Mapping[str, Knee], host_s: float) -> str:
    """Rates at 190 ms per token, and what follows from them."""
    orca, level = knees["Orca, 128"].rate, best(knees)
    rows: list[Sequence[str | float | None]] = [
        [name, None, knee.rate, "-"] for name, knee in knees.items() if name != "Orca, 128"
    ]
    theirs = PUBLISHED["Orca, 128"]
    rows.insert(0, ["Orca, 128", theirs, orca, ratio(orca, theirs)])
    stated = PUBLISHED["request level"]
    rows.append(["request level, better", stated, level, ratio(level, stated)])
    rows.append(["Orca over request level", 36.9, orca / level, ratio(orca / level, 36.9)])
    rows.append(["host, ms per step (fitted)", None, 1000 * host_s, "-"])
    return table(["at 190 ms per token", "published", "measured", "ratio"], rows)


def draw(knees: Mapping[str, Knee]) -> Picture:
    """Median latency per token against the rate; the rate's axis is logarithmic."""
    picture, (axis,) = panels([3.4], width=8.0)
    for (name, knee), colour in zip(knees.items(), style.series_colours(len(knees)), strict=True):
        axis.plot(
            [point.rate for point in knee.points],
            [1000 * point.latency_s for point in knee.points],
            marker="o",
            markersize=4,
            color=colour,
            label=name,
        )
    for name, rate in PUBLISHED.items():
        axis.plot(rate, 1000 * LEVEL_S, "k", marker="x", linestyle="", markersize=8)
        axis.annotate(f"{name}, published", (rate, 1000 * LEVEL_S), (0, 8), fontsize=8.5,
                      textcoords="offset points", ha="center")  # fmt: skip
    axis.axhline(1000 * IDLE_S, color=style.GRID, linewidth=0.8, zorder=0)
    axis.set_xscale("log")
    axis.set_ylim(0, 400)
    axis.set_xlabel("requests/s")
    axis.set_ylabel("median latency, ms per token")
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    title(axis, "175B on 16 A100-40G, Orca's synthetic trace")
    return picture


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
