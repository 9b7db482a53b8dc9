"""What runs a step: the protocol that the scripted, real and simulated executors share."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from paxserve.step import Rows, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order they are submitted; at most a few are in flight."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step."""

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""

    def reset(self) -> None:
        """A step failed and no sequence is left: forget steps in flight, be ready for new ones."""


class Repeats(NamedTuple):
    """How a step of decodes goes on, if the same rows decode again and again.

    tokens: what each row samples, every time. terms_s: what the step takes in which every row is so
    many tokens further. padded_tokens, padded_rows: as in each `StepResult`.
    """

    tokens: Sequence[int]
    terms_s: Callable[[int], tuple[float, ...]]
    padded_tokens: int
    padded_rows: int


@runtime_checkable
class Repeating(Protocol):
    """What an executor has beside `Executor` that knows steps without running them."""

    def repeats(self, rows: Rows) -> Repeats | None:
        """The steps behind one of these rows, which all decode; None if it cannot tell."""
