"""Which cached block that nobody holds dies first: the protocol of the eviction axis."""

from typing import NamedTuple, Protocol


class BlockStats(NamedTuple):
    """What is known of a cached block at the moment when its last holder lets go.

    last_used: number of the release (they are counted) that let go of it; one call releases a
        whole table, so the blocks of a sequence share it.
    num_hits: how often the prefix cache has handed it out since it was published.
    depth: blocks before it in its prefix.
    """

    last_used: int
    num_hits: int
    depth: int


class Eviction(Protocol):
    """Ranks cached blocks without a holder; the smallest key is evicted first. All keys of one
    order are equally long.
    """

    def key(self, block: BlockStats) -> tuple[int, ...]:
        """Rank, taken once, when the block becomes unreferenced."""
