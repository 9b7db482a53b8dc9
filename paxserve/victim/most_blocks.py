"""The request that holds the most memory is preempted first: one victim frees the most.

Source: none published that we know of; the opposite of fewest computed tokens, where Kwon et al.,
SOSP'23, section 4.5 takes the latest whatever it holds. A block that sequences share counts once.
"""

from dataclasses import dataclass

from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class MostBlocks:
    """By distinct blocks in its tables, most first, then newest."""

    def key(self, request: Request) -> tuple[int, int]:
        """See `Victim.key`."""
        blocks = {block_id for s in request.sequences for block_id in s.block_table}
        return (-len(blocks), -request.admitted_seq)
