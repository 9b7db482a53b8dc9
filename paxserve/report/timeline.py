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
    """Who was in which row when.

    A request enters each of its rows with an event; one that ends or leaves without naming a row
    does so in all of them.
    """
    log = run.need("decisions", "time_s", "kind", "request_id", "row")
    open_stays: dict[int, Stay] = {}
    stays = []
    for event in log[log["kind"].isin(_MOVES)].itertuples():
        time_s = event.time_s - run.origin_s
        names_a_row = event.row in open_stays or event.kind == Kind.ENTERED
        rows = [event.row] if names_a_row else _rows_of(event.request_id, open_stays)
        if event.kind == Kind.FINISHED:
            open_stays |= {row: open_stays[row]._replace(finished_s=time_s) for row in rows}
            continue
        stays += [_closed(open_stays.pop(row), time_s) for row in rows if row in open_stays]
        if event.kind == Kind.ENTERED:
            open_stays[event.row] = Stay(event.row, event.request_id, time_s, _RUNS, _RUNS)
    return Timeline(run.limit("max_num_seqs"), run.end_s, tuple(stays))


_MOVES = (Kind.ENTERED, Kind.FINISHED, Kind.PREEMPTED, Kind.RELEASED)
_RUNS = -1.0  # instead of a time: it has not come to that


def _rows_of(request_id: str, open_stays: dict[int, Stay]) -> list[int]:
    return [row for row, stay in open_stays.items() if stay.request_id == request_id]


def _closed(stay: Stay, time_s: float) -> Stay:
    finished_s = time_s if stay.finished_s == _RUNS else stay.finished_s
    return stay._replace(finished_s=finished_s, end_s=time_s)


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
