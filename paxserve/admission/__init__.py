"""In which order waiting requests enter: the protocol of the admission axis.

An order ranks waiting requests by a key, smallest first; ties go to the one submitted earlier. One
that depends on the request alone needs only `key` (its state is None). One that learns is a pure
fold: `state = observe(state, seen)`. State is plain data that the mechanism owns and hands from
call to call; `observe` may return it changed in place, and reads of a request only what never
changes (its prompt, its origin, its id, and once it has ended its output), so that a replay gives
an equal state. A preempted request waits again under the same order; its early arrival is what
puts it in front under first come, first served.

So that a step costs what runs and not what waits, a learning order splits the waiting requests
into queues by their `place`. Inside a queue, requests keep the place that they were pushed with,
and only the heads of queues are ranked against each other, by their keys of the moment. After an
event only the queue of the request it names is looked at again, after a timer every queue is: a
head whose place has changed moves there, and then the next head is looked at. Requests that share
a queue must therefore be ordered by their places as by their keys, in whatever state.

Time enters only through what is seen; `next_timer_s` asks for a `Kind.TIMER` at a time.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from paxserve.events import Kind
from paxserve.request import Request

type Key = tuple[float | int, ...]


class Seen(NamedTuple):
    """Something that happened, as learning policies see it.

    kind: ARRIVED, ENTERED (into a row), SERVED (took part in a step that has run), PREEMPTED (or
        held back after it had entered), FINISHED, or TIMER (then `request` is None).
    num_tokens: tokens computed in the step that served it, of which some may be recomputed.
    num_outputs: tokens sampled in that step, over all its sequences.
    duration_s: how long that step took.
    """

    kind: Kind
    time_s: float
    request: Request | None = None
    num_tokens: int = 0
    num_outputs: int = 0
    duration_s: float = 0.0


class Admission(Protocol):
    """`displaces_running`: a waiting request that finds no row or memory takes those of running
    requests whose key, asked now, is larger than its own, worst first.
    """

    @property
    def displaces_running(self) -> bool:
        """See above; False for orders that only queue."""

    def key(self, state: Any, request: Request) -> Key:
        """Rank."""


@runtime_checkable
class Learning(Protocol):
    """What an order that learns has beside `key`."""

    def init(self) -> Any:
        """The state before anything was seen."""

    def observe(self, state: Any, seen: Seen) -> Any:
        """The state after it."""

    def place(self, state: Any, request: Request) -> tuple[Hashable, Key]:
        """The queue in which a waiting request stands, and where in it."""

    def next_timer_s(self, state: Any, heads: Iterable[Request]) -> float | None:
        """When a timer should be seen next, given the heads of all queues; None for never."""


@runtime_checkable
class Reordering(Protocol):
    """What an order has that depends on the prefix cache as it is now (`key` ranks the rest)."""

    @property
    def reorders_at_most(self) -> int:
        """Above this many waiting requests `key` alone decides."""

    def reorder(
        self, requests: Sequence[Request], num_cached_tokens: Callable[[Request], int]
    ) -> list[Request]:
        """The waiting requests, given by `key`, in the order for this step; some may be left out,
        and then wait.
        """
