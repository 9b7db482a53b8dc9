"""First come, first served.

Source: Orca, OSDI'22, Algorithm 1; vLLM's default.
"""

from dataclasses import dataclass

from paxserve.admission import Key
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Fcfs:
    """By arrival."""

    displaces_running = False

    def key(self, state: None, request: Request) -> Key:
        """See `Admission.key`."""
        return (request.arrival_s,)
