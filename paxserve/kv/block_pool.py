"""Who holds each block.

Owns: reference counts, and through them every hand-out and return. The placement's `FreeSpace`
owns the order in which free blocks are found. Must not know: requests, tokens.
"""

from collections.abc import Sequence

from paxserve.placement import Placement


class BlockPool:
    """Reference-counted blocks.

    Invariant: num_free + num_referenced + 1 (the null block 0) == num_blocks, and
    `ref_count(b)` is the number of block tables that hold b.
    """

    def __init__(self, *, num_blocks: int, placement: Placement) -> None:
        self.num_blocks = num_blocks
        self.free_space = placement.open(num_blocks)
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.free_space.num_free

    @property
    def num_referenced(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self._ref_counts.count(0)

    def ref_count(self, block_id: int) -> int:
        """Tables that hold the block."""
        return self._ref_counts[block_id]

    def take(self, num_blocks: int) -> list[int] | None:
        """Blocks for a new table, or None; a refusal changes nothing."""
        return self._claim(self.free_space.take(num_blocks))

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        """More blocks for a table that already holds some, or None; a refusal changes nothing."""
        return self._claim(self.free_space.extend(block_table, num_blocks))

    def release(self, block_ids: Sequence[int]) -> None:
        """One table lets go of these blocks.

        Raises:
            RuntimeError: a block is named twice, is the null block, or is held by nobody.
        """
        counts = self._ref_counts
        wrong = [b for b in block_ids if b == 0 or counts[b] < 1]
        if wrong or len(set(block_ids)) != len(block_ids):
            raise RuntimeError(
                f"release of blocks that are not held once each: {list(block_ids)}, "
                f"null or unreferenced among them: {wrong}"
            )
        for block_id in block_ids:
            counts[block_id] -= 1
        self.free_space.give_back([b for b in block_ids if not counts[b]])

    def _claim(self, block_ids: list[int] | None) -> list[int] | None:
        for block_id in block_ids or ():
            if block_id == 0 or self._ref_counts[block_id]:
                raise RuntimeError(f"placement handed out block {block_id}, which is not free")
            self._ref_counts[block_id] = 1
        return block_ids
