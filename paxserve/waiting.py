"""The waiting requests, in the order that the admission policy gives.

Owns: the order, and the admission policy's state. In: requests, and what is seen of them. Out:
requests, best first. Must not know: why a request is not admitted.
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from paxserve.admission import Admission, Key, Learning, Reordering, Seen
from paxserve.events import Kind
from paxserve.request import Request
from paxserve.sorted_entries import Entry, SortedEntries


class WaitingQueue:
    """Queues of requests, and the heads of the queues; an order that does not learn has one queue.

    Invariants: a waiting request has one entry (*place, arrival_seq, request, queue), in the queue
    of its place when it was pushed or last moved; no queue is empty. Once settled, `_heads` holds
    for each queue one rank (*key now, arrival_seq, entry), that of its first entry, whose place is
    current; until then `_unsettled` names the queues for which that may be wrong. No comparison
    goes beyond `arrival_seq`, since that differs.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._learning = admission if isinstance(admission, Learning) else None
        self._reordering = admission if isinstance(admission, Reordering) else None
        self.clear()

    def clear(self) -> None:
        """Nobody waits, and nothing was learned."""
        self._state: Any = None if self._learning is None else self._learning.init()
        self._entry_of: dict[Request, Entry] = {}
        self._queues: dict[Hashable, SortedEntries] = {}
        self._heads = SortedEntries()
        self._rank_of_head: dict[Hashable, Entry] = {}
        self._unsettled: dict[Hashable, None] = {}
        self._num_changes = 0
        self._reordered: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, request: Request) -> bool:
        return request in self._entry_of

    @property
    def learns(self) -> bool:
        """Whether `tell` does anything."""
        return self._learning is not None

    @property
    def reorders(self) -> bool:
        """Whether the order depends on the prefix cache."""
        return self._reordering is not None

    @property
    def num_changes(self) -> int:
        """Grows with everything that may change who is first."""
        return self._num_changes

    def push(self, request: Request) -> None:
        """The request waits; it must not wait already."""
        if request in self._entry_of:
            raise RuntimeError(f"request {request.request_id} waits already")
        self._put(self._entry(request))

    def remove(self, request: Request) -> None:
        """The request waits no longer."""
        if request not in self._entry_of:
            raise RuntimeError(f"request {request.request_id} is not waiting")
        entry = self._entry_of.pop(request)
        queue = self._queues[entry[-1]]
        queue.remove(entry)
        if not len(queue):
            del self._queues[entry[-1]]
        self._look_again(entry[-1])

    def tell(self, seen: Seen) -> None:
        """Something happened; no-op for an order that does not learn."""
        learning = self._learning
        if learning is None:
            return
        self._state = learning.observe(self._state, seen)
        if seen.request is not None:
            self._look_again(learning.place(self._state, seen.request)[0])
        elif seen.kind is Kind.TIMER:
            for name in self._queues:
                self._look_again(name)

    def next_timer_s(self) -> float | None:
        """When `tell` should be told of a `Kind.TIMER`; None for never."""
        if self._learning is None:
            return None
        self._settle()
        heads = (rank[-1][-2] for rank in self._rank_of_head.values())
        return self._learning.next_timer_s(self._state, heads)

    def rank(self, request: Request) -> Key:
        """The key of now, also of a request that does not wait."""
        return self._admission.key(self._state, request)

    def order(self, num_cached_tokens: Callable[[Request], int]) -> None:
        """A step begins: an order that depends on the prefix cache decides for this step.

        Raises:
            RuntimeError: it named a request twice, or one that does not wait.
        """
        self._reordered, policy = None, self._reordering
        if policy is None or len(self) > policy.reorders_at_most:
            return
        reordered = policy.reorder(list(self), num_cached_tokens)
        if len(set(reordered)) < len(reordered) or not self._entry_of.keys() >= set(reordered):
            raise RuntimeError(
                f"{type(policy).__name__} must order waiting requests, each at most once; it gave "
                f"{[request.request_id for request in reordered]}"
            )
        self._reordered = reordered

    def forget_order(self) -> None:
        """The step is decided: what an order said of the prefix cache holds no longer."""
        self._reordered = None

    def head(self) -> Request | None:
        """The first that `__iter__` would give, in O(1) when nothing has changed."""
        if self._reordered is not None:
            return next(iter(self), None)
        self._settle()
        rank = self._heads.first()
        return None if rank is None else rank[-1][-2]

    def __iter__(self) -> Iterator[Request]:
        """Each waiting request, best first by the keys of the moment, O(log n) each.

        Between two of them anything may change; what comes in behind the point that the walk has
        reached in its queue is met by it. Nothing is taken out, so any number of walks may be
        under way, or left in the middle.
        """
        if self._reordered is not None:
            yield from (r for r in self._reordered if r in self._entry_of)
            return
        reached: dict[Hashable, Entry] = {}
        is_at_end = False
        while not is_at_end:
            self._settle()
            num_changes, is_at_end = self._num_changes, True
            for entry in self._ranked(reached):
                yield entry[-2]
                if self._num_changes != num_changes:
                    is_at_end = False
                    break

    def _ranked(self, reached: dict[Hashable, Entry]) -> Iterator[Entry]:
        """Entries behind those `reached` in their queues, best first, while nothing changes."""
        behind = [r for entry in reached.values() if (r := self._rank_after(entry))]
        heapify(behind)
        head = self._heads.first()
        while True:
            while head is not None and head[-1][-1] in reached:
                head = self._heads.after(head)
            if behind and (head is None or behind[0] < head):
                rank = heappop(behind)
            elif head is not None:
                rank = head
            else:
                return
            entry = rank[-1]
            reached[entry[-1]] = entry
            yield entry
            following = self._rank_after(entry)
            if following is not None:
                heappush(behind, following)

    def _rank_after(self, entry: Entry) -> Entry | None:
        queue = self._queues.get(entry[-1])
        following = None if queue is None else queue.after(entry)
        return None if following is None else self._rank(following)

    def _rank(self, entry: Entry) -> Entry:
        if self._learning is None:  # its place is its key, and neither changes while it waits
            return entry, entry
        *_, arrival_seq, request, _ = entry
        return (*self._admission.key(self._state, request), arrival_seq, entry)

    def _entry(self, request: Request) -> Entry:
        if self._learning is None:
            name, place = None, self._admission.key(None, request)
        else:
            name, place = self._learning.place(self._state, request)
        if any(part != part for part in place):
            raise RuntimeError(
                f"admission {type(self._admission).__name__} ranks request {request.request_id} "
                f"by {place}: NaN has no order"
            )
        return (*place, request.arrival_seq, request, name)

    def _put(self, entry: Entry) -> None:
        name = entry[-1]
        self._entry_of[entry[-2]] = entry
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = SortedEntries()
        queue.add(entry)
        self._look_again(name)

    def _look_again(self, name: Hashable) -> None:
        self._unsettled[name] = None
        self._num_changes += 1

    def _settle(self) -> None:
        """Let each head stand where its place and its key of now put it."""
        while self._unsettled:
            name, _ = self._unsettled.popitem()
            stale = self._rank_of_head.pop(name, None)
            if stale is not None:
                self._heads.remove(stale)
            queue = self._queues.get(name)
            entry = None if queue is None else queue.first()
            if entry is None:
                continue
            current = entry if self._learning is None else self._entry(entry[-2])
            if current == entry:
                self._rank_of_head[name] = rank = self._rank(entry)
                self._heads.add(rank)
            else:
                self.remove(entry[-2])
                self._put(current)
