"""The first run of free blocks that is long enough: how a contiguous KV cache is laid out.

Source: the systems that PagedAttention replaced (Kwon et al., SOSP'23, section 3.1) ask the
framework for one tensor per request; first fit is Knuth's name for the search (TAOCP 1, 2.5).
A table grows only into the blocks right behind it. Knuth walks a list of free runs; here a tree
finds the first fit in the logarithm of the pool.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paxserve.placement import FreeSpace


class _Runs:
    """The free runs, as long as can be: [start, end) with neither neighbour free.

    `_tree` is a heap-shaped tree over all addresses: the leaf of `start` holds the length of the
    run that starts there, else 0; a parent holds the larger of its children.

    Invariant: a run is in the tree at its start, in `_start_of` at its end, in `_num_runs_of` by
    its length.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = 0
        self._num_leaves = 1 << num_blocks.bit_length()
        self._tree = [0] * (2 * self._num_leaves)
        self._start_of: dict[int, int] = {}
        self._num_runs_of: Counter[int] = Counter()
        self._add(1, num_blocks)

    def take(self, num_blocks: int) -> list[int] | None:
        if self._tree[1] < num_blocks:
            return None
        node = 1
        while node < self._num_leaves:
            node *= 2
            if self._tree[node] < num_blocks:
                node += 1
        return self._cut(node - self._num_leaves, num_blocks)

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        start = block_table[-1] + 1
        return self._cut(start, num_blocks) if self._length(start) >= num_blocks else None

    def give_back(self, block_ids: Iterable[int]) -> None:
        for start, end in _stretches(block_ids):
            left, right = self._start_of.get(start, start), end + self._length(end)
            if left < start:
                self._remove(left, start)
            if end < right:
                self._remove(end, right)
            self._add(left, right)

    def largest_free_run(self) -> int:
        return self._tree[1]

    def num_unfit(self, num_blocks: int) -> int:
        """Looks at each length once, and n lengths need n (n + 1) / 2 free blocks."""
        lengths = self._num_runs_of.items()
        return sum([length * count for length, count in lengths if length < num_blocks])

    def _length(self, start: int) -> int:
        return self._tree[self._num_leaves + start]

    def _cut(self, start: int, num_blocks: int) -> list[int]:
        cut, end = start + num_blocks, start + self._length(start)
        self._remove(start, end)
        if cut < end:
            self._add(cut, end)
        return list(range(start, cut))

    def _add(self, start: int, end: int) -> None:
        length = end - start
        self.num_free += length
        self._start_of[end] = start
        self._num_runs_of[length] += 1
        self._set_leaf(start, length)

    def _remove(self, start: int, end: int) -> None:
        length = end - start
        self.num_free -= length
        del self._start_of[end]
        self._num_runs_of[length] -= 1
        if not self._num_runs_of[length]:
            del self._num_runs_of[length]
        self._set_leaf(start, 0)

    def _set_leaf(self, start: int, length: int) -> None:
        tree, node = self._tree, self._num_leaves + start
        tree[node] = length
        while node > 1:
            node //= 2
            longest = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == longest:
                break
            tree[node] = longest


def _stretches(block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs [start, end) of ids that follow each other, upwards or downwards, in any order of runs:
    a sequence gives its last block back first.
    """
    start = end = 0
    for block_id in block_ids:
        if start < end and block_id == end:
            end += 1
        elif start < end and block_id == start - 1:
            start = block_id
        else:
            if start < end:
                yield start, end
            start, end = block_id, block_id + 1
    if start < end:
        yield start, end


@dataclass(frozen=True, slots=True)
class FirstFit:
    """A table is one run of consecutive blocks, placed at the lowest address where it fits."""

    contiguous = True

    def open(self, num_blocks: int) -> FreeSpace:
        """See `Placement.open`."""
        return _Runs(num_blocks)
