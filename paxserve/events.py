"""What happened, in order: the decision log.

Owns: `Event`, its kinds, and the list of them with the step and time they are stamped with. A
decode is not an event (step records count them); everything that changes who holds what is.
Must not know: why.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What `num_tokens` of an event counts stands behind each kind."""

    ARRIVED = "arrived"  # prompt tokens
    REJECTED = "rejected"  # nothing; it never became a request
    ENTERED = "entered"  # known tokens: the prompt, or prompt and output when it resumes
    CHUNK = "chunk"  # tokens computed in this step, where they are more than a decode's one
    HELD_BACK = "held_back"  # tokens asked for; the head of the queue did not enter in this step
    PREEMPTED = "preempted"  # computed tokens given up
    FINISHED = "finished"  # output tokens
    RELEASED = "released"  # slots given back
    EVICTED = "evicted"  # slots of cached blocks that were taken for new content
    COPIED = "copied"  # slots of blocks copied before a write (copy on write)
    SERVED = "served"  # only seen by learning policies, never logged
    TIMER = "timer"  # only seen by learning policies, never logged


UNASKED = "batching did not ask"  # why a head is held back whom nothing has refused


class Event(NamedTuple):
    """One entry; `detail` is a reason, a method or an error text. `row` is -1 without a row, and
    for what happens to several rows at once; rows enter and are released one by one.
    """

    step_id: int
    time_s: float
    kind: Kind
    request_id: str
    num_tokens: int = 0
    row: int = -1
    detail: str = ""


class EventLog:
    """Events so far, oldest first. `step_id` and `now_s` stamp the next ones.

    Args:
        keeps: whether those of earlier steps stay, once the next step begins.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.step_id = 0
        self.now_s = 0.0
        self.keeps = keeps
        self._events: list[Event] = []
        self._num_dropped = 0

    def begin_step(self, now_s: float) -> None:
        """The next step begins."""
        self.step_id += 1
        self.now_s = now_s
        if not self.keeps:
            self._num_dropped += len(self._events)
            self._events.clear()

    def add(
        self, kind: Kind, request_id: str, *, num_tokens: int = 0, row: int = -1, detail: str = ""
    ) -> None:
        """Something happened now."""
        self._events.append(
            Event(self.step_id, self.now_s, kind, request_id, num_tokens, row, detail)
        )

    def __iter__(self) -> Iterator[Event]:
        """Those that are kept."""
        return iter(self._events)

    def __len__(self) -> int:
        """How many there ever were."""
        return self._num_dropped + len(self._events)

    def since(self, start: int) -> list[Event]:
        """Event number `start` and all later ones, as far as they are kept."""
        return self._events[max(0, start - self._num_dropped) :]
