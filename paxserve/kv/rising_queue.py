"""Tuples popped smallest first, cheap where they come in about the order in which they go.

Owns: the order. In: tuples that differ. Out: the smallest. Must not know: what they mean.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

type Entry = tuple[int, ...]


class RisingQueue:
    """A sorted run, and a heap for what comes too late for it: least recently used blocks, say,
    come in the order in which they will be evicted, so that nothing is ever compared in depth.

    Invariant: `_run` is sorted.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._run = deque(sorted(entries))
        self._late: list[Entry] = []

    def __len__(self) -> int:
        return len(self._run) + len(self._late)

    def push(self, entry: Entry) -> None:
        """O(1) for one that is the largest of the run, else O(log n)."""
        if not self._run or self._run[-1] < entry:
            self._run.append(entry)
        else:
            heappush(self._late, entry)

    def pop(self) -> Entry:
        """The smallest; there must be one."""
        if self._late and not (self._run and self._run[0] < self._late[0]):
            return heappop(self._late)
        return self._run.popleft()
