"""The block let go of longest ago is evicted first; of one table, the deepest.

Source: vLLM's automatic prefix caching (RFC vllm#2614) and RadixAttention (SGLang, NeurIPS'24,
section 3), whose orders agree: a table is released at once, so depth decides among its blocks and
a block dies before those that its prefix needs.
"""

from dataclasses import dataclass

from paxserve.eviction import BlockStats


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used."""

    def key(self, block: BlockStats) -> tuple[int, int]:
        """See `Eviction.key`."""
        return (block.last_used, -block.depth)
