"""Where a reservation lies in the pool: the protocol of the placement axis.

A placement is a choice (a frozen dataclass) that opens a `FreeSpace`, the mutable mechanism that
owns the free blocks. Blocks are numbered 1 .. num_blocks - 1; block 0 is the null block and is
never handed out. A refusal (None) changes nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol


class FreeSpace(Protocol):
    """The free blocks of a pool."""

    @property
    def num_free(self) -> int:
        """Free blocks."""

    def take(self, num_blocks: int) -> list[int] | None:
        """At least `num_blocks` (>= 1) blocks for a new table, or None."""

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        """At least `num_blocks` more for a table that is not empty, or None."""

    def give_back(self, block_ids: Iterable[int]) -> None:
        """These blocks are free again."""

    def largest_free_run(self) -> int:
        """Length of the longest run of consecutive free blocks."""

    def num_unfit(self, num_blocks: int) -> int:
        """Free blocks that lie in no place where `num_blocks` could be taken: fragmentation."""


class Placement(Protocol):
    """A way to find blocks. `contiguous`: a table's blocks are consecutive."""

    contiguous: bool

    def open(self, num_blocks: int) -> FreeSpace:
        """Free space over a pool of `num_blocks`, the null block included."""
