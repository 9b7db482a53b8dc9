"""Any other order, with waiting counted in its favour.

Source: aging as in operating systems (Silberschatz et al., Operating System Concepts, chapter on
CPU scheduling). A request's key falls by `rate` for every second since it arrived. All keys fall at
the same rate, so their order never changes by itself: key - rate * (now - arrival) ranks as
key + rate * arrival does, and no clock is needed. One that arrived later overtakes only if its key
is smaller by more than rate times the time between them, so nobody waits for ever.

The rate is in units of the other order's first key per second: tokens for sjf and srpt, counted
tokens for vtc, levels for mlfq. Under an order that learns, it ranks the queues of that order by
their heads; inside a queue that order's own places stand.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paxserve import compose
from paxserve.admission import Admission, Key, Learning, Reordering, Seen
from paxserve.numbers import real
from paxserve.request import Request

MOST_RATE = 1e9


@dataclass(frozen=True)  # no slots: the inner order is made once and kept
class Aging:
    """Args:

    inner: name of an order in this folder.
    rate: how much of its first key a second of waiting is worth.
    inner_settings: its settings, where they are not its defaults.
    """

    inner: str
    rate: float
    inner_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the fields."""
        real("rate", self.rate, high=MOST_RATE)
        if not isinstance(self.inner, str) or ":" in self.inner:
            raise ValueError(f"inner must be the name of an admission order, got {self.inner!r}")
        if not isinstance(self.inner_settings, Mapping):
            raise ValueError(f"inner_settings must map names to values: {self.inner_settings!r}")
        if isinstance(self._order, Reordering):
            raise ValueError(
                f"admission=aging cannot wrap {self.inner}, whose order depends on the prefix "
                "cache and not on a key: choose another inner order"
            )

    @cached_property
    def _order(self) -> Admission:
        order: Admission = compose.load("admission", self.inner, self.inner_settings)
        return order

    @property
    def displaces_running(self) -> bool:
        """As the inner order."""
        return self._order.displaces_running

    def key(self, state: Any, request: Request) -> Key:
        """See `Admission.key`."""
        first, *rest = self._order.key(state, request)
        return (first + self.rate * request.arrival_s, *rest)

    def init(self) -> Any:
        """See `Learning.init`; None around an order that does not learn."""
        order = self._order
        return order.init() if isinstance(order, Learning) else None

    def observe(self, state: Any, seen: Seen) -> Any:
        """See `Learning.observe`."""
        order = self._order
        return order.observe(state, seen) if isinstance(order, Learning) else state

    def place(self, state: Any, request: Request) -> tuple[Hashable, Key]:
        """See `Learning.place`."""
        order = self._order
        if isinstance(order, Learning):
            return order.place(state, request)
        return None, self.key(state, request)

    def next_timer_s(self, state: Any, heads: Iterable[Request]) -> float | None:
        """See `Learning.next_timer_s`."""
        order = self._order
        return order.next_timer_s(state, heads) if isinstance(order, Learning) else None
