"""The waiting requests, in the order that the admission policy gives.

Owns: the order, and the admission policy's state. In: requests, events. Out: requests, best first.
Must not know: why a request is not admitted.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any

from paxserve.admission import Admission, Key
from paxserve.request import Request

type _Entry = tuple[Key, int, Request]


class WaitingQueue:
    """Invariant: entries are sorted by (key, arrival) and hold each waiting request once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._state: Any = None
        self._entries: list[_Entry] = []
        self._entry_of: dict[Request, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request: Request) -> None:
        """The request waits; it must not wait already."""
        self._entry_of[request] = entry = self._entry(request)
        insort(self._entries, entry)

    def remove(self, request: Request) -> None:
        """The request waits no longer; found under the key it was pushed with."""
        if request not in self._entry_of:
            raise RuntimeError(f"request {request.request_id} is not waiting")
        del self._entries[bisect_left(self._entries, self._entry_of.pop(request))]

    def clear(self) -> None:
        """Nobody waits."""
        self._entries.clear()
        self._entry_of.clear()

    learns = False

    def tell(self, seen: Any) -> None: ...

    def head(self) -> Request | None:
        return next(iter(self), None)

    def next_timer_s(self) -> float | None:
        return None

    def rank(self, request: Request) -> Key:
        return self._admission.key(self._state, request)

    def order(self, num_cached_tokens: Any) -> "WaitingQueue":
        return self

    def __iter__(self) -> Iterator[Request]:
        """Each waiting request, best first; the queue may change between two of them."""
        position = 0
        while position < len(self._entries):
            entry = self._entries[position]
            yield entry[2]
            position = bisect_right(self._entries, entry)

    def _entry(self, request: Request) -> _Entry:
        return self._admission.key(self._state, request), request.arrival_seq, request
