"""Which computed blocks can be found again by their content: the protocol of the prefix_cache axis.

A prefix cache is a choice (a frozen dataclass) that opens an `Index`, the mechanism that maps
token prefixes to blocks. It knows content, never who holds a block: references and the order of
eviction are the block pool's. Only full blocks are found, from the first token on.

`publish` says when a block may be found: at `planning`, as soon as a step that computes it is
being planned (sound, since in every layer a step's KV writes precede its reads), or `after_step`.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

type Publish = Literal["planning", "after_step"]


class Index(Protocol):
    """Invariant: a block is indexed under at most one prefix, and a prefix names one block."""

    def __len__(self) -> int:
        """Indexed blocks."""

    def __contains__(self, block_id: int) -> bool:
        """Whether this block can be found."""

    def match(self, token_ids: Sequence[int], *, salt: str, num_blocks: int) -> list[int]:
        """The blocks that hold the longest indexed prefix, at most `num_blocks` of them; tokens
        are compared, so that no two prefixes are ever taken for each other.
        """

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], *, salt: str, start: int
    ) -> list[int]:
        """Blocks number `start` and on of `block_ids` are full and may be found.

        Args:
            token_ids: the sequence's tokens from its first, enough for all of `block_ids`.
            block_ids: its block table from its first block.
            salt: of the request.
            start: blocks before it were inserted already (by this or another sequence).

        Returns:
            The blocks that are now indexed and were not before. A prefix that is indexed under
            another block stays there: that one is found, this one is not.
        """

    def depth(self, block_id: int) -> int:
        """Blocks before it in its prefix."""

    def may_evict(self, block_id: int) -> bool:
        """Whether it may be removed now: an index with leaf order says no while it has followers."""

    def remove(self, block_id: int) -> int | None:
        """It is found no more. Returns the indexed block before it in its prefix, if that has
        become a leaf by this, else None.
        """


class PrefixCache(Protocol):
    """A way to find blocks again. `shares` is False only where nothing is ever found."""

    @property
    def shares(self) -> bool:
        """See above."""

    @property
    def publish(self) -> Publish:
        """See above."""

    def open(self, block_size: int) -> Index:
        """An empty index over blocks of `block_size` slots."""
