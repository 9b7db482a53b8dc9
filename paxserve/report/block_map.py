"""The block map: which request holds each KV block, over time.

Owns: how changes become a map, and the picture. In: `blocks.parquet` and the steps. Out: a picture.
Must not know: placements.

A row of `blocks.parquet` is one change, in order of steps:

| column | type | meaning |
|---|---|---|
| step_id | int64 | the step from which on it holds |
| block_id | int64 | a block of the device, or of the host's pool: those count on from num_blocks |
| holder | string | the request; of a shared block its first; empty where there is none |
| kind | string | live; held (by a finished request); cached; free; host (swapped out) |

Blocks begin free. Of several changes of a block in one step the last one counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from paxserve.report import style
from paxserve.report.memory import step_edges
from paxserve.report.run_tables import MissingData, RunTables
from paxserve.report.style import Picture, legend_below, panels, title
from paxserve.report.timeline import Colour, request_colours

KINDS = ("free", "cached", "held", "live", "host")
FREE, CACHED, HELD = 0, 1, 2
_NUM_COLUMNS = 1400


class BlockMap(NamedTuple):
    """One run's blocks over its steps.

    codes: [num_steps, num_blocks]; 0 free, 1 cached, 2 held, 3 + i live and of request i, in the
    device's pool or the host's. num_device_blocks: later columns are the host's.
    """

    codes: np.ndarray
    request_ids: tuple[str, ...]
    num_device_blocks: int


def block_map(run: RunTables, rows: np.ndarray | None = None) -> BlockMap:
    """Replay the changes.

    Args:
        run: with `blocks.parquet`.
        rows: the steps, by position in the table and increasing, to take a picture at; default all.

    Raises:
        MissingData: the run did not record blocks.
        ValueError: a kind that does not exist, or a change of a step that was not run.
    """
    changes = run.need("blocks", "step_id", "block_id", "holder", "kind")
    unknown = sorted(set(changes["kind"]) - set(KINDS))
    if unknown:
        raise ValueError(f"{run.path}/blocks.parquet: kind {unknown} is none of {KINDS}")
    request_ids = tuple(dict.fromkeys(changes["holder"][changes["kind"].isin(("live", "host"))]))
    codes = _codes(changes["kind"].to_numpy(), changes["holder"].to_numpy(), request_ids)
    num_device_blocks = run.limit("num_blocks")
    blocks = changes["block_id"].to_numpy()
    num_blocks = max(num_device_blocks, int(blocks.max(initial=0)) + 1)
    step_ids = run.need("steps", "step_id")["step_id"].to_numpy()
    at = np.searchsorted(step_ids, changes["step_id"].to_numpy())
    wanted = np.arange(len(step_ids)) if rows is None else rows
    state, taken, done = np.zeros(num_blocks, np.int32), [], 0
    for row in wanted:
        until = int(np.searchsorted(at, row, side="right"))
        state[blocks[done:until]] = codes[done:until]  # of equal indices numpy keeps the last
        taken.append(state.copy())
        done = until
    shape = (len(taken), num_blocks)
    return BlockMap(np.array(taken, np.int32).reshape(shape), request_ids, num_device_blocks)


def draw_blocks(runs: Sequence[RunTables]) -> Picture:
    """Runs one under another: time to the right, block ids downwards, colours are requests."""
    colours = request_colours(runs)
    picture, axes = panels([3.6] * len(runs), share_x=True)
    for axis, run in zip(axes, runs, strict=True):
        _draw(axis, run, colours)
    axes[-1].set_xlim(0, max(run.end_s for run in runs) or 1.0)
    axes[-1].set_xlabel("seconds since the first arrival")
    a_request = Patch(color=next(iter(colours.values()), style.IDLE), label="a request's block")
    cached = Patch(color=style.BLACK, label="cached, held by nobody")
    held = Patch(color=style.DEAD, label="held by a finished request")
    free = Patch(color=style.IDLE, label="free")
    legend_below(picture, [a_request, cached, held, free], columns=4)
    return picture


def _codes(kinds: np.ndarray, holders: np.ndarray, request_ids: Sequence[str]) -> np.ndarray:
    first = len((FREE, CACHED, HELD))
    of_request = {name: first + i for i, name in enumerate(request_ids)}
    of_kind = {"free": FREE, "cached": CACHED, "held": HELD}
    pairs = zip(kinds, holders, strict=True)
    return np.array([of_kind.get(k, of_request.get(h, FREE)) for k, h in pairs], np.int32)


def _draw(axis: Axes, run: RunTables, colours: dict[str, Colour]) -> None:
    if not len(run.steps):
        raise MissingData(f"{run.path} has no step to draw blocks of")
    times, rows = step_edges(run)
    columns = np.linspace(0, run.end_s, _NUM_COLUMNS, endpoint=False)
    at = np.maximum.accumulate(rows[np.searchsorted(times, columns, side="right") - 1])
    found = block_map(run, np.maximum(at, 0))
    palette = [to_rgb(c) for c in (style.IDLE, style.BLACK, style.DEAD)]
    palette += [colours[name][:3] for name in found.request_ids]
    num_blocks = found.codes.shape[1]
    axis.imshow(
        np.array(palette)[found.codes.T],
        extent=(0, run.end_s, num_blocks - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest" if num_blocks < 300 else "antialiased",
    )
    if num_blocks > found.num_device_blocks:
        axis.axhline(found.num_device_blocks - 0.5, color=style.BLACK, linewidth=1)
        axis.text(
            run.end_s, num_blocks - 1, "host's pool ", ha="right", va="bottom", fontsize=9,
            color=style.BLACK,
        )  # fmt: skip
    axis.set_ylim(num_blocks - 0.5, 0.5)  # without the null block
    axis.set_ylabel("block")
    title(axis, run.title)
