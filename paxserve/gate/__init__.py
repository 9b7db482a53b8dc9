"""What may hold back a request that is next in order: the protocol of the gate axis.

Gates are a list, asked in turn before a request is admitted; the first refusal stands. A gate that
learns (`paxserve.admission.Learning` without queues and timers) keeps a state like an admission
order's; for the others `state` is None.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from paxserve.admission import Seen
from paxserve.request import Request


class MemoryView(NamedTuple):
    """The memory a gate sees, in blocks.

    num_usable: of the pool. num_free: free, or held only by the prefix cache.
    num_needed: new blocks that admission would take now, for the tokens of this step.
    num_needed_for_all: new blocks for all known tokens of the request.
    num_cached_tokens: tokens of the request found in the prefix cache.
    block_size: slots per block.
    running: requests that hold rows and are not finished, in order of admission.
    newcomers: those of them that entered in this step.
    """

    num_usable: int
    num_free: int
    num_needed: int
    num_needed_for_all: int = 0
    num_cached_tokens: int = 0
    block_size: int = 1
    running: tuple[Request, ...] = ()
    newcomers: frozenset[Request] = frozenset()


class Gate(Protocol):
    """A condition on memory."""

    def refusal(self, state: Any, request: Request, memory: MemoryView) -> str | None:
        """Why the request may not enter now, for the event log; None lets it in."""


@runtime_checkable
class LearningGate(Protocol):
    """What a gate that learns has beside `refusal`."""

    def init(self) -> Any:
        """The state before anything was seen."""

    def observe(self, state: Any, seen: Seen) -> Any:
        """The state after it."""
