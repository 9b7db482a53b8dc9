"""Tuples in ascending order, with the cheap end in front.

Owns: the order. In: tuples that differ, added and removed in any order. Out: the first, and the
next after one. Must not know: what the tuples mean.
"""

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush
from typing import Any

FRONT = 64

type Entry = tuple[Any, ...]


class SortedEntries:
    """A short sorted list before a heap: who reads only the first few never touches the many.

    A full balanced order would cost each push a search through cold memory; here what comes in
    far behind costs a push on a heap, and the heap is popped `FRONT` entries at a time.

    Invariants: `_front` is sorted; no entry of it is greater than one of the heap `_back`;
    `_removed` are entries of `_back` that no longer count.
    """

    def __init__(self) -> None:
        self._front: list[Entry] = []
        self._back: list[Entry] = []
        self._removed: set[Entry] = set()

    def __len__(self) -> int:
        return len(self._front) + len(self._back) - len(self._removed)

    def add(self, entry: Entry) -> None:
        """O(log n)."""
        if self._removed and entry in self._removed:
            self._removed.remove(entry)  # it still lies where it belongs
        elif self._front and entry < self._front[-1]:
            insort(self._front, entry)
            if len(self._front) > 2 * FRONT:
                self._shorten_front()
        else:
            heappush(self._back, entry)

    def remove(self, entry: Entry) -> None:
        """O(log n), amortised; the entry must be here."""
        front = self._front
        position = bisect_left(front, entry)
        if position < len(front):
            del front[position]
            return
        self._removed.add(entry)
        if len(self._removed) > FRONT + len(self._back) // 2:
            self._back = [kept for kept in self._back if kept not in self._removed]
            heapify(self._back)
            self._removed.clear()

    def first(self) -> Entry | None:
        """The smallest entry, None if there is none."""
        return self._front[0] if self._front or self._lengthen_front() else None

    def after(self, entry: Entry) -> Entry | None:
        """The smallest entry greater than this one, which need not be here."""
        front = self._front
        position = bisect_right(front, entry)
        while position == len(front):
            if not self._lengthen_front():
                return None
            position = bisect_right(front, entry, lo=position)
        return front[position]

    def _lengthen_front(self) -> bool:
        length = len(self._front)
        while self._back and len(self._front) < length + FRONT:
            entry = heappop(self._back)
            if entry in self._removed:
                self._removed.remove(entry)
            else:
                self._front.append(entry)
        return len(self._front) > length

    def _shorten_front(self) -> None:
        for entry in self._front[FRONT:]:
            heappush(self._back, entry)
        del self._front[FRONT:]
