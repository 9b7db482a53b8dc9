"""Any free block will do: PagedAttention's placement.

Source: Kwon et al., SOSP'23, section 4.2. The last block given back is the first taken again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paxserve.placement import FreeSpace


class _Stack:
    """Invariant: `_free` holds distinct ids."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_blocks: int) -> list[int] | None:
        if num_blocks > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_blocks)]

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        return self.take(num_blocks)

    def give_back(self, block_ids: Iterable[int]) -> None:
        self._free.extend(block_ids)

    def largest_free_run(self) -> int:
        longest = length = previous = 0
        for block_id in sorted(self._free):
            length = length + 1 if block_id == previous + 1 else 1
            longest = max(longest, length)
            previous = block_id
        return longest

    def num_unfit(self, num_blocks: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Paged:
    """Blocks lie anywhere; fragmentation between requests cannot happen."""

    contiguous = False

    def open(self, num_blocks: int) -> FreeSpace:
        """See `Placement.open`."""
        return _Stack(num_blocks)
