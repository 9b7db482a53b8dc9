"""Two runs of one workload, held against each other.

Owns: what equal means for decisions and figures. In: two finished runs. Out: a `Likeness`. Must
not know: how they were run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paxserve.events import Event
from paxserve.experiment import Run
from paxserve.metrics import Summary

NOT_OF_SERVING = ("warm_up_s", "num_executables")
EQUAL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """num_decisions: of the first run; num_different: places where the logs differ, times
    included, of which `first_difference` is the first. worst_figure: the figure of the summary that
    differs most, by `worst_error`, relative where it is above one.
    """

    num_decisions: int
    num_different: int
    first_difference: tuple[Event | None, Event | None] | None
    worst_figure: str
    worst_error: float

    @property
    def is_equal(self) -> bool:
        """Every decision equal, every figure to `EQUAL`."""
        return self.num_different == 0 and self.worst_error <= EQUAL


def likeness(first: Run, second: Run) -> Likeness:
    """Compare decision logs row by row, and summaries figure by figure."""
    ours, theirs = list(first.engine.events), list(second.engine.events)
    length = max(len(ours), len(theirs))
    pairs = [
        (ours[i] if i < len(ours) else None, theirs[i] if i < len(theirs) else None)
        for i in range(length)
    ]
    different = [pair for pair in pairs if pair[0] != pair[1]]
    errors = figure_errors(first.summary, second.summary)
    worst = max(errors, key=lambda name: errors[name])
    return Likeness(
        num_decisions=len(ours),
        num_different=len(different),
        first_difference=different[0] if different else None,
        worst_figure=worst,
        worst_error=errors[worst],
    )


def figure_errors(first: Summary, second: Summary) -> Mapping[str, float]:
    """By how much each figure of serving differs; infinite where only one of them has it."""
    names = [name for name in {**first, **second} if name not in NOT_OF_SERVING]
    return {name: _error(first.get(name), second.get(name)) for name in names}


def _error(ours: float | None, theirs: float | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    return abs(ours - theirs) / max(1.0, abs(ours))
