"""The block found least often is evicted first; among equals, the least recently used.

Source: `LFUStrategy` of SGLang's radix cache (hit count, then last access), which ranks leaves.
Differs: blocks are ranked, so the deepest of one table comes last in the key. A hit on a block is
a hit on all before it, so a prefix has at least the hits of what follows; only a block that was
evicted and inserted again starts at none.
"""

from dataclasses import dataclass

from paxserve.eviction import BlockStats


@dataclass(frozen=True, slots=True)
class Lfu:
    """Least frequently used."""

    def key(self, block: BlockStats) -> tuple[int, int, int]:
        """See `Eviction.key`."""
        return (block.num_hits, block.last_used, -block.depth)
