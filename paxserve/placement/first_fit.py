"""The first run of free blocks that is long enough: how a contiguous KV cache is laid out.

Source: the systems that PagedAttention replaced (Kwon et al., SOSP'23, section 3.1) ask the
framework for one tensor per request; first fit is Knuth's name for the search (TAOCP 1, 2.5).
A table grows only into the blocks right behind it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paxserve.placement import FreeSpace


class _Runs:
    """Invariant: runs are sorted, disjoint, not adjacent: `ends[i] < starts[i + 1]`."""

    def __init__(self, num_blocks: int) -> None:
        self._starts = [1]
        self._ends = [num_blocks]

    @property
    def num_free(self) -> int:
        return sum(self._lengths())

    def take(self, num_blocks: int) -> list[int] | None:
        for i, length in enumerate(self._lengths()):
            if length >= num_blocks:
                return self._cut(i, num_blocks)
        return None

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        i = bisect_left(self._starts, block_table[-1] + 1)
        if i == len(self._starts) or self._starts[i] != block_table[-1] + 1:
            return None
        return self._cut(i, num_blocks) if self._lengths()[i] >= num_blocks else None

    def give_back(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            i = bisect_left(self._starts, block_id)
            joins_left = i > 0 and self._ends[i - 1] == block_id
            joins_right = i < len(self._starts) and self._starts[i] == block_id + 1
            if joins_left and joins_right:
                self._ends[i - 1] = self._ends.pop(i)
                del self._starts[i]
            elif joins_left:
                self._ends[i - 1] = block_id + 1
            elif joins_right:
                self._starts[i] = block_id
            else:
                self._starts.insert(i, block_id)
                self._ends.insert(i, block_id + 1)

    def largest_free_run(self) -> int:
        return max(self._lengths(), default=0)

    def num_unfit(self, num_blocks: int) -> int:
        return sum([length for length in self._lengths() if length < num_blocks])

    def _lengths(self) -> list[int]:
        return [end - start for start, end in zip(self._starts, self._ends, strict=True)]

    def _cut(self, i: int, num_blocks: int) -> list[int]:
        start = self._starts[i]
        self._starts[i] = start + num_blocks
        if self._starts[i] == self._ends[i]:
            del self._starts[i], self._ends[i]
        return list(range(start, start + num_blocks))


@dataclass(frozen=True, slots=True)
class FirstFit:
    """A table is one run of consecutive blocks, placed at the lowest address where it fits."""

    contiguous = True

    def open(self, num_blocks: int) -> FreeSpace:
        """See `Placement.open`."""
        return _Runs(num_blocks)
