"""In which order waiting requests enter: the protocol of the admission axis.

A policy is a pure fold over events: `state = observe(state, event)`, and `key(state, request)`
ranks the waiting requests, smallest first. State is plain data. A preempted request waits again
under the same order; its early arrival is what puts it in front under first come, first served.
"""

from typing import Any, Protocol

from paxserve.events import Event
from paxserve.request import Request

type Key = tuple[float | int, ...]


class Admission(Protocol):
    """`stateless`: the key depends on the request alone, so events need not be shown to it."""

    stateless: bool

    def init(self) -> Any:
        """The state before the first event."""

    def observe(self, state: Any, event: Event) -> Any:
        """The state after an event."""

    def key(self, state: Any, request: Request) -> Key:
        """Rank; ties go to the earlier arrival."""
