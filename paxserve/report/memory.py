"""Pictures of KV memory: the bars of Figure 2, and slots and batch size over time.

Owns: which slot classes make which part, and the two pictures. In: saved tables. Out: pictures.
Must not know: how slots are counted (`ledger.py`).

The parts follow Figure 2 of the vLLM paper (Kwon et al., SOSP'23): token states = live; reservation
= reserved and used later; internal fragmentation = reserved and never used, and the tail of the
last block; external = rounding of the placement, and free in no run long enough. What the figure
does not have: cached, held by finished requests, free.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from paxserve.report import style
from paxserve.report.run_tables import RunTables
from paxserve.report.style import Picture, legend_below, panels, title, whole_numbers


class Part(NamedTuple):
    """A part of the pool: the sum of some slot classes."""

    label: str
    classes: tuple[str, ...]
    colour: str

    @property
    def is_dark(self) -> bool:
        """Whether white text can be read on it."""
        return self.colour in (style.BLUE, style.VERMILLION, style.GREEN)


PARTS = (
    Part("token states", ("live",), style.BLUE),
    Part("reservation", ("reserved_used",), style.SKY),
    Part("internal fragmentation", ("reserved_unused", "tail"), style.ORANGE),
    Part("external fragmentation", ("rounding", "free_unfit"), style.VERMILLION),
    Part("held by finished requests", ("held",), style.DEAD),
    Part("cached", ("cached",), style.GREEN),
    Part("free", ("free",), style.IDLE),
)
_NOT_IN_OLD_RUNS = {"cached"}
_LEAST_LABELLED = 3.0  # percent that a number fits into
_NULL = "null"


def part_shares(run: RunTables) -> pd.Series:
    """Share of the usable pool in each part, weighted by step time; they sum to 1.

    Raises:
        MissingData: a slot class was not recorded.
    """
    over_time = part_shares_by_step(run)
    weights = run.steps["duration_s"].to_numpy()
    if not weights.sum() > 0:
        weights = np.ones(len(over_time))
    means = np.average(over_time.to_numpy(), axis=0, weights=weights)
    return pd.Series(means, index=over_time.columns)


def part_shares_by_step(run: RunTables) -> pd.DataFrame:
    """Share of the usable pool in each part: a row per step, a column per part."""
    recorded = [name for part in PARTS for name in part.classes if name not in _NOT_IN_OLD_RUNS]
    run.need("steps", *(f"slots_{name}" for name in [*recorded, _NULL]))
    if not len(run.steps):
        return pd.DataFrame([[0.0] * (len(PARTS) - 1) + [1.0]], columns=_labels())
    slots = run.ledger.drop(columns=["step_id", "start_s", "duration_s"])
    usable = slots.sum(axis=1) - slots[_NULL]
    parts = {
        part.label: slots.reindex(columns=list(part.classes), fill_value=0).sum(axis=1) / usable
        for part in PARTS
    }
    return pd.DataFrame(parts)


def draw_memory_bars(runs: Sequence[RunTables]) -> Picture:
    """Figure 2: a bar per run, its parts in percent of the usable pool, mean over step time."""
    shares = [part_shares(run) for run in runs]
    picture, (axis,) = panels([1.5 + 0.62 * len(runs)])
    for y, share in enumerate(shares):
        _draw_bar(axis, y, share)
    axis.set_yticks(range(len(runs)), [_two_lines(run) for run in runs])
    axis.set_ylim(len(runs) - 0.5, -0.6)
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the usable KV slots, mean over the time in steps")
    axis.spines["left"].set_visible(False)
    axis.tick_params(left=False)
    title(axis, "What KV memory holds")
    _legend(picture, shares)
    return picture


def draw_kv(runs: Sequence[RunTables]) -> Picture:
    """Per run: the parts of the pool over time, and under them how many requests ran and waited."""
    picture, axes = panels([2.3, 1.5] * len(runs), share_x=True)
    shares = [part_shares_by_step(run) for run in runs]
    for run, share, memory, batch in zip(runs, shares, axes[::2], axes[1::2], strict=True):
        _draw_parts(memory, run, share)
        _draw_batch(batch, run)
    axes[-1].set_xlim(0, max(run.end_s for run in runs) or 1.0)
    axes[-1].set_xlabel("seconds since the first arrival")
    _legend(picture, [share.max() for share in shares])
    return picture


def _legend(picture: Picture, shares: Sequence[pd.Series]) -> None:
    """Of the parts that are there."""
    shown = [part for part in PARTS if any(share[part.label] > 0 for share in shares)]
    legend_below(picture, [Patch(color=p.colour, label=p.label) for p in shown], columns=4)


def _draw_bar(axis: Axes, y: int, share: pd.Series) -> None:
    """A number in each part, and over those too narrow for it."""
    left = 0.0
    for part in PARTS:
        width = 100 * share[part.label]
        axis.barh(y, width, left=left, color=part.colour, height=0.66, edgecolor="white")
        is_narrow = width < _LEAST_LABELLED
        if width >= 0.05:
            axis.text(
                left + width / 2,
                y - 0.42 if is_narrow else y,
                f"{width:.1f}",
                color="white" if part.is_dark and not is_narrow else style.BLACK,
                fontsize=8 if is_narrow else 9.5,
                ha="center",
                va="center",
            )
        left += width


def _draw_parts(axis: Axes, run: RunTables, shares: pd.DataFrame) -> None:
    times, rows = step_edges(run)
    stacked = np.zeros(len(times))
    idle = np.array([0.0] * (len(PARTS) - 1) + [1.0])  # drawn as free while no step runs
    percent = 100 * np.vstack([shares.to_numpy(), idle])[rows]
    for part, values in zip(PARTS, percent.T, strict=True):
        axis.fill_between(
            times, stacked, stacked + values, step="post", color=part.colour, linewidth=0
        )
        stacked = stacked + values
    axis.set_ylim(0, 100)
    axis.set_ylabel("% of KV slots")
    title(axis, run.title)


def _draw_batch(axis: Axes, run: RunTables) -> None:
    steps = run.need("steps", "num_running", "num_waiting")
    times, rows = step_edges(run)
    for column, label, colour in (
        ("num_waiting", "waiting", style.PURPLE),
        ("num_running", "running", style.BLUE),
    ):
        values = np.append(steps[column].to_numpy(), 0)[rows]
        axis.step(times, values, where="post", color=colour, linewidth=1.4, label=label)
    axis.set_ylim(bottom=0)
    whole_numbers(axis)
    axis.set_ylabel("requests")
    axis.legend(loc="upper right", frameon=True, framealpha=0.85, edgecolor="none", fontsize=9)


def step_edges(run: RunTables) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the step in force changes, and which it is from then on; -1 when none is.

    Times count from the first arrival. Between steps lies the host's own time; only a gap longer
    than the median step is idle.
    """
    steps = run.need("steps", "start_s", "duration_s")
    starts = steps["start_s"].to_numpy(np.float64) - run.origin_s
    ends = starts + steps["duration_s"].to_numpy(np.float64)
    if not len(steps):
        return np.array([0.0]), np.array([-1])
    is_gap = np.append(starts[1:] - ends[:-1] > np.median(ends - starts), True)
    times = np.concatenate([starts, ends[is_gap]])
    rows = np.concatenate([np.arange(len(steps)), np.full(int(is_gap.sum()), -1)])
    order = np.argsort(times, kind="stable")
    return times[order], rows[order]


def _labels() -> list[str]:
    return [part.label for part in PARTS]


def _two_lines(run: RunTables) -> str:
    return f"{run.name}\n{', '.join(run.policies.values())}"
