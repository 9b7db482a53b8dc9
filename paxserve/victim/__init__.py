"""Who is preempted when memory is short: the protocol of the victim axis."""

from typing import Protocol

from paxserve.request import Request


class Victim(Protocol):
    """Ranks the running requests; the smallest key is preempted first."""

    def key(self, request: Request) -> tuple[float | int, ...]:
        """Rank; the asker is ranked too and may be its own victim."""
