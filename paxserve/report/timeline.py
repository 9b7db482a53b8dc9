"""The row timeline: lines are rows of the batch, colours are requests, grey is dead or idle.

Owns: how occupancy follows from the decision log, and the picture. In: saved tables. Out: a
picture. Must not know: policies.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from paxserve.events import Kind
from paxserve.report.run_tables import RunTables
from paxserve.report.style import DEAD, IDLE, Picture, legend_below, panels, title, whole_numbers

type Colour = tuple[float, float, float, float]

BAR_HEIGHT = 0.86
MOST_INCHES = 6.0


class Stay(NamedTuple):
    """A request in a row, [start_s, end_s); dead from `finished_s` on."""

    row: int
    request_id: str
    start_s: float
    finished_s: float
    end_s: float


class Timeline(NamedTuple):
    """One run's stays, on a clock that starts with its first arrival."""

    num_rows: int
    end_s: float
    stays: tuple[Stay, ...]


def timeline(run: RunTables) -> Timeline:
    """Who was in which row when."""
    log = run.need("decisions", "time_s", "kind", "request_id", "row")
    open_stays: dict[int, Stay] = {}
    stays = []
    for event in log.itertuples():
        row, time_s = event.row, event.time_s - run.origin_s
        if event.kind == Kind.ENTERED:
            open_stays[row] = Stay(row, event.request_id, time_s, -1.0, -1.0)
        elif row not in open_stays:
            continue  # it entered in a step that failed, or the event is of no row
        elif event.kind == Kind.FINISHED:
            open_stays[row] = open_stays[row]._replace(finished_s=time_s)
        elif event.kind in (Kind.PREEMPTED, Kind.RELEASED):
            stay = open_stays.pop(row)
            lived_until_s = time_s if stay.finished_s < 0 else stay.finished_s
            stays.append(stay._replace(finished_s=lived_until_s, end_s=time_s))
    return Timeline(run.limit("max_num_seqs"), run.end_s, tuple(stays))


def draw_timelines(runs: Sequence[RunTables]) -> Picture:
    """Runs one under another on a common time axis."""
    lines = [timeline(run) for run in runs]
    colours = request_colours(runs)
    picture, axes = panels([_inches(line.num_rows) for line in lines], share_x=True)
    for axis, run, line in zip(axes, runs, lines, strict=True):
        _draw(axis, line, colours)
        title(axis, f"{run.title}: done after {line.end_s:.1f} s")
    axes[-1].set_xlim(0, max(line.end_s for line in lines) or 1.0)
    axes[-1].set_xlabel("seconds since the first arrival")
    a_request = Patch(color=next(iter(colours.values()), IDLE), label="a request, one colour each")
    dead = Patch(color=DEAD, label="dead: finished, row and memory still held")
    legend_below(picture, [a_request, dead, Patch(color=IDLE, label="idle")], columns=3)
    return picture


def _inches(num_rows: int) -> float:
    return min(0.8 + 0.19 * num_rows, MOST_INCHES)


def _draw(axis: Axes, line: Timeline, colours: dict[str, Colour]) -> None:
    """Two calls for all bars: runs have thousands."""
    axis.barh(range(line.num_rows), line.end_s, color=IDLE, height=BAR_HEIGHT, linewidth=0)
    axis.barh(
        [stay.row for stay in line.stays],
        [stay.finished_s - stay.start_s for stay in line.stays],
        left=[stay.start_s for stay in line.stays],
        color=[colours[stay.request_id] for stay in line.stays],
        height=BAR_HEIGHT,
        edgecolor="white",
        linewidth=0.4,
    )
    dead = [stay for stay in line.stays if stay.end_s > stay.finished_s]
    axis.barh(
        [stay.row for stay in dead],
        [stay.end_s - stay.finished_s for stay in dead],
        left=[stay.finished_s for stay in dead],
        color=DEAD,
        height=BAR_HEIGHT,
        linewidth=0,
    )
    axis.set_ylabel("row")
    axis.set_ylim(line.num_rows - 0.5, -0.5)
    whole_numbers(axis)
    axis.spines["left"].set_visible(False)


def request_colours(runs: Iterable[RunTables]) -> dict[str, Colour]:
    """A colour per request, the same in every run and picture; neighbours differ."""
    palette = mpl.colormaps["turbo"]
    golden = 0.618033988749895
    ids = dict.fromkeys(
        name for run in runs for name in run.need("requests", "request_id").request_id
    )
    return {name: palette(0.08 + 0.84 * (i * golden % 1.0)) for i, name in enumerate(ids)}
