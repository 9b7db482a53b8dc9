"""The host's blocks, to which preempted sequences are swapped out.

Owns: which host blocks are free. Must not know: what is in them.
"""


class HostPool:
    """Invariant: every host block is free or was taken and not given back."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free host blocks."""
        return len(self._free)

    def take(self, num_blocks: int) -> list[int] | None:
        """So many host blocks, or None; a refusal changes nothing."""
        if num_blocks > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_blocks)]

    def give_back(self, block_ids: list[int]) -> None:
        """These host blocks are free again."""
        self._free.extend(block_ids)
