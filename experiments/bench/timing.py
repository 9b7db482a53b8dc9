"""Ratios of interleaved pairs, and how they are printed.

Owns: the clock, and the form of a line. In: two things to run. Out: a line per bar. The machine may
be noisy, so times are compared within a pair only. Must not know: what is run.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

type Run = Callable[[], object]


class Bar(NamedTuple):
    """The most that a ratio must and should be."""

    must: float
    goal: float | None = None

    def verdict(self, ratio: float) -> str:
        """How a ratio stands to the bar."""
        if ratio > self.must:
            return f"bar {self.must} x: DOES NOT HOLD"
        if self.goal is None:
            return f"bar {self.must} x: holds"
        return f"bar {self.must} x: holds, goal {self.goal} x: " + (
            "holds" if ratio <= self.goal else "does not"
        )


def seconds(run: Run, times: int = 1) -> float:
    """Wall time of running it so many times."""
    started_s = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - started_s


def interleaved(num_rounds: int, *runs: Run) -> list[tuple[float, ...]]:
    """Seconds of each, all of them once per round."""
    return [tuple([seconds(run) for run in runs]) for _ in range(num_rounds)]


def report(name: str, ours: Sequence[float], base: Sequence[float], bar: Bar | None) -> None:
    """Print the median ratio, and whether the bar holds; without a bar it stands as measured."""
    ratio = statistics.median(a / b for a, b in zip(ours, base, strict=True))
    verdict = "as measured" if bar is None else bar.verdict(ratio)
    print(
        f"{name}: {ratio:.2f} x, {verdict}  (medians {1000 * statistics.median(ours):.3f} ms and "
        f"{1000 * statistics.median(base):.4f} ms, {len(ours)} pairs)",
        flush=True,
    )
