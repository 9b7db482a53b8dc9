"""What runs a step: the protocol that the scripted, real (and later simulated) executors share."""

from typing import Protocol

from paxserve.step import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order they are submitted; at most a few are in flight."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step."""

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""

    def reset(self) -> None:
        """A step failed and no sequence is left: forget steps in flight, be ready for new ones."""
