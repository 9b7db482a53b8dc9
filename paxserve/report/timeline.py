"""The row timeline: lines are rows of the batch, colours are requests, grey is dead or idle.

Owns: how occupancy follows from the event log, and the picture. In: events and step records. Out: a
PNG. Must not know: policies.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paxserve.events import Event, Kind
from paxserve.records import StepRecord

type Colour = tuple[float, float, float, float]

DEAD = "#8c8c8c"
IDLE = "#e4e4e4"
BAR_HEIGHT = 0.86


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


def timeline(events: Iterable[Event], steps: Sequence[StepRecord], *, num_rows: int) -> Timeline:
    """Who was in which row when."""
    log = list(events)
    origin_s = min((event.time_s for event in log if event.kind is Kind.ARRIVED), default=0.0)
    last_s = steps[-1].start_s + steps[-1].duration_s if steps else origin_s
    open_stays: dict[int, tuple[str, float, float | None]] = {}
    stays = []
    for event in log:
        time_s = event.time_s - origin_s
        if event.kind is Kind.ENTERED:
            open_stays[event.row] = (event.request_id, time_s, None)
        elif event.kind is Kind.FINISHED and event.row in open_stays:
            request_id, start_s, _ = open_stays[event.row]
            open_stays[event.row] = (request_id, start_s, time_s)
        elif event.kind in (Kind.PREEMPTED, Kind.RELEASED):
            if event.row not in open_stays:
                continue  # it entered in a step that failed
            request_id, start_s, finished_s = open_stays.pop(event.row)
            lived_until_s = time_s if finished_s is None else finished_s
            stays.append(Stay(event.row, request_id, start_s, lived_until_s, time_s))
    return Timeline(num_rows, last_s - origin_s, tuple(stays))


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw runs one under another on a common time axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    colours = _colours(timelines)
    end_s = max(line.end_s for line in timelines.values())
    heights = [line.num_rows for line in timelines.values()]
    figure, axes = plt.subplots(
        len(timelines),
        1,
        sharex=True,
        squeeze=False,
        figsize=(12, 1.6 + 0.19 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis, (name, line) in zip(axes[:, 0], timelines.items(), strict=True):
        for row in range(line.num_rows):
            axis.barh(row, line.end_s, color=IDLE, height=BAR_HEIGHT, linewidth=0)
        for stay in line.stays:
            lived = stay.finished_s - stay.start_s
            axis.barh(
                stay.row,
                lived,
                left=stay.start_s,
                color=colours[stay.request_id],
                height=BAR_HEIGHT,
                edgecolor="white",
                linewidth=0.4,
            )
            axis.barh(
                stay.row,
                stay.end_s - stay.finished_s,
                left=stay.finished_s,
                color=DEAD,
                height=BAR_HEIGHT,
                linewidth=0,
            )
        axis.set_title(f"{name}: done after {line.end_s:.0f} s", loc="left", fontsize=11)
        axis.set_ylabel("row")
        axis.set_ylim(line.num_rows - 0.5, -0.5)
        axis.set_xlim(0, end_s)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("seconds since the first arrival")
    figure.legend(
        handles=[
            Patch(color=colours[next(iter(colours))], label="a request, one colour each"),
            Patch(color=DEAD, label="dead: finished, row and memory still held"),
            Patch(color=IDLE, label="idle"),
        ],
        loc="outside lower left",
        ncol=3,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _colours(timelines: Mapping[str, Timeline]) -> dict[str, Colour]:
    """A colour per request, the same in every run; neighbours differ."""
    import matplotlib as mpl

    ids = list(dict.fromkeys(s.request_id for line in timelines.values() for s in line.stays))
    palette = mpl.colormaps["turbo"]
    golden = 0.618033988749895
    return {name: palette(0.08 + 0.84 * (i * golden % 1.0)) for i, name in enumerate(ids)}
