"""Aligned runs of a power of two: how Orca's baselines lay out a contiguous KV cache.

Source: Kwon et al., SOSP'23, section 6.1 (Orca with a buddy allocator); Knuth, TAOCP 1, 2.5.
Knuth's pool is a power of two; here the pool is cut into the largest aligned runs, a pool of 13
into 8 + 4 + 1. Among the smallest free runs that are long enough, the lowest address is taken.
Knuth's areas never grow; here a table may swallow the buddies to its right, if all are free.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from paxserve.placement import FreeSpace

_FIRST_BLOCK = 1  # has offset 0; buddies are aligned by offset


class _Starts:
    """Offsets of the free runs of one length.

    Invariant: every free offset is in the heap, and no offset is there twice. A merged run stays
    in the heap until it comes to the top.
    """

    def __init__(self) -> None:
        self._free: set[int] = set()
        self._heap: list[int] = []
        self._in_heap: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    def __contains__(self, offset: int) -> bool:
        return offset in self._free

    def add(self, offset: int) -> None:
        self._free.add(offset)
        if offset not in self._in_heap:
            self._in_heap.add(offset)
            heappush(self._heap, offset)

    def remove(self, offset: int) -> None:
        self._free.remove(offset)

    def pop_lowest(self) -> int:
        while True:
            offset = heappop(self._heap)
            self._in_heap.remove(offset)
            if offset in self._free:
                self._free.remove(offset)
                return offset


class _Buddies:
    """`_runs[k]` holds the free runs of 2^k blocks.

    Invariant: the runs are those of the free blocks that are aligned, as long as can be, and
    disjoint. So what is free decides how it is cut, and any blocks may come back in any order.
    """

    def __init__(self, num_blocks: int) -> None:
        num_usable = num_blocks - _FIRST_BLOCK
        self._runs = [_Starts() for _ in range(num_usable.bit_length())]
        for k in range(len(self._runs)):
            if num_usable >> k & 1:
                self._runs[k].add(num_usable >> (k + 1) << (k + 1))

    @property
    def num_free(self) -> int:
        return self._num_free_below(len(self._runs))

    def take(self, num_blocks: int) -> list[int] | None:
        wanted = _power_for(num_blocks)
        for k in range(wanted, len(self._runs)):
            if self._runs[k]:
                offset = self._runs[k].pop_lowest()
                for half in range(wanted, k):
                    self._runs[half].add(offset + (1 << half))
                return _block_ids(offset, offset + (1 << wanted))
        return None

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        """Fills the aligned run that begins where the table does and has room for it."""
        offset, held = block_table[0] - _FIRST_BLOCK, len(block_table)
        length = 1 << _power_for(held + num_blocks)
        if offset % length:
            return None
        buddies = []
        end = held
        while end < length:
            k = _power_for(end & -end)
            if offset + end not in self._runs[k]:
                return None
            buddies.append((k, offset + end))
            end += 1 << k
        for k, buddy in buddies:
            self._runs[k].remove(buddy)
        return _block_ids(offset + held, offset + length)

    def give_back(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            offset, k = block_id - _FIRST_BLOCK, 0
            while (buddy := offset ^ (1 << k)) in self._runs[k]:
                self._runs[k].remove(buddy)
                offset = min(offset, buddy)
                k += 1
            self._runs[k].add(offset)

    def largest_free_run(self) -> int:
        """For reports: looks at every run. Neighbours that are no buddies count as one run."""
        longest = length = end = 0
        for offset, k in sorted((o, k) for k, runs in enumerate(self._runs) for o in runs):
            length = length + (1 << k) if offset == end else 1 << k
            longest, end = max(longest, length), offset + (1 << k)
        return longest

    def num_unfit(self, num_blocks: int) -> int:
        return self._num_free_below(_power_for(num_blocks))

    def _num_free_below(self, power: int) -> int:
        return sum([len(runs) << k for k, runs in enumerate(self._runs[:power])])


def _power_for(num_blocks: int) -> int:
    """The smallest k with 2^k >= num_blocks."""
    return (num_blocks - 1).bit_length()


def _block_ids(start: int, end: int) -> list[int]:
    return list(range(start + _FIRST_BLOCK, end + _FIRST_BLOCK))


@dataclass(frozen=True, slots=True)
class Buddy:
    """A table is one aligned run of a power of two, so it may be longer than asked."""

    contiguous = True

    def open(self, num_blocks: int) -> FreeSpace:
        """See `Placement.open`."""
        return _Buddies(num_blocks)
