"""Most urgent first.

Source: vLLM's priority scheduling: the smaller `priority`, the more urgent; ties by arrival. There
a more urgent request takes memory only of running ones that the step comes to late;
`displaces_running` lets it take rows and memory of any less urgent one.
A request that is displaced gives up its memory with its row, even where memory is not short.
"""

from dataclasses import dataclass

from paxserve.admission import Key
from paxserve.numbers import flag
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Priority:
    """By the priority of its origin."""

    displaces_running: bool = False

    def __post_init__(self) -> None:
        """Check the field."""
        flag("displaces_running", self.displaces_running)

    def key(self, state: None, request: Request) -> Key:
        """See `Admission.key`."""
        return (request.origin.priority,)
