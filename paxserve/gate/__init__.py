"""What may hold back a request that is next in order: the protocol of the gate axis.

Gates are a list, asked in turn before a request is admitted; the first refusal stands.
"""

from typing import NamedTuple, Protocol

from paxserve.request import Request


class MemoryView(NamedTuple):
    """The memory a gate sees, in blocks; `num_needed` is what admission would take now."""

    num_usable: int
    num_free: int
    num_needed: int


class Gate(Protocol):
    """A condition on memory."""

    def refusal(self, request: Request, memory: MemoryView) -> str | None:
        """Why the request may not enter now, for the event log; None lets it in."""
