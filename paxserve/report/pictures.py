"""All pictures by name, and how they are written.

Owns: the list, and where files go. In: run directories. Out: PNG files. Must not know: how a
picture is drawn.
"""

from collections.abc import Callable, Iterator, Sequence
from os.path import commonpath
from pathlib import Path

from paxserve.report.block_map import draw_blocks
from paxserve.report.latency import draw_latency, draw_throughput
from paxserve.report.memory import draw_kv, draw_memory_bars
from paxserve.report.run_tables import MissingData, RunTables
from paxserve.report.style import Picture
from paxserve.report.timeline import draw_timelines

type Draw = Callable[[Sequence[RunTables]], Picture]

PICTURES: dict[str, Draw] = {
    "timeline": draw_timelines,
    "blocks": draw_blocks,
    "memory": draw_memory_bars,
    "kv": draw_kv,
    "latency": draw_latency,
    "throughput": draw_throughput,
}


def plot(
    runs: Sequence[RunTables], *, out: Path | None = None, only: Sequence[str] = ()
) -> Iterator[Path | str]:
    """Write pictures of runs, all runs in each.

    Args:
        runs: at least one.
        out: directory; default: the run's own, or the one that holds all of them.
        only: which pictures; default: all that the tables allow.

    Yields:
        The path of a picture, or why one of them was left out.

    Raises:
        ValueError: no such picture.
        MissingData: a picture of `only` needs what was not recorded.
    """
    unknown = sorted(set(only) - set(PICTURES))
    if unknown:
        raise ValueError(f"no picture is called {', '.join(unknown)}; there are {sorted(PICTURES)}")
    directory = out or _directory(runs)
    directory.mkdir(parents=True, exist_ok=True)
    for name in only or PICTURES:
        try:
            picture = PICTURES[name](runs)
        except MissingData as error:
            if only:
                raise
            yield f"no {name}.png: {error}"
            continue
        picture.save(directory / f"{name}.png")
        yield directory / f"{name}.png"


def _directory(runs: Sequence[RunTables]) -> Path:
    paths = [run.path for run in runs]
    return paths[0] if len(paths) == 1 else Path(commonpath([p.resolve() for p in paths]))
