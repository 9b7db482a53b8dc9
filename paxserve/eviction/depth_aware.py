"""The block that lies deepest in its prefix is evicted first, whenever it was used.

Source: ours. What many requests share, such as a system prompt, lies at the front, and one long
conversation should not push it out. The nearest published order is LengthAwareCache in Mooncake
(arXiv 2407.00079, section 4.2), which weighs a block's position together with its use counts and
comes out slightly below LRU on their trace. Differs: position alone, then LRU.
"""

from dataclasses import dataclass

from paxserve.eviction import BlockStats


@dataclass(frozen=True, slots=True)
class DepthAware:
    """Deepest first."""

    def key(self, block: BlockStats) -> tuple[int, int]:
        """See `Eviction.key`."""
        return (-block.depth, block.last_used)
