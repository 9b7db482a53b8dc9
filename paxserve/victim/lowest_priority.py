"""The least urgent request is preempted first.

Source: vLLM's `--scheduling-policy priority`: the largest priority value goes first. vLLM breaks
ties by the latest arrival; here by the latest admission, like every choice of this axis.
"""

from dataclasses import dataclass

from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class LowestPriority:
    """By `origin.priority`, largest first, then newest."""

    def key(self, request: Request) -> tuple[int, int]:
        """See `Victim.key`."""
        return (-request.origin.priority, -request.admitted_seq)
