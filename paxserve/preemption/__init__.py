"""How a victim gives up its memory: the protocol of the preemption axis."""

from enum import StrEnum
from typing import NamedTuple, Protocol

from paxserve.request import Request


class Method(StrEnum):
    """`RECOMPUTE`: drop the KV, compute the same tokens again on resume. `SWAP`: copy the blocks
    to the host's pool, and back on resume.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"


class VictimView(NamedTuple):
    """What preempting a request would give up.

    num_computed_tokens: distinct slots that hold its KV. num_blocks: distinct blocks with KV.
    num_free_host_blocks: room in the host's pool; a swap that does not fit becomes a recompute.
    """

    num_computed_tokens: int
    num_blocks: int
    num_free_host_blocks: int


class Preemption(Protocol):
    """Chooses the method, victim by victim. `swaps`: it may answer SWAP, so a host pool is made."""

    @property
    def swaps(self) -> bool:
        """See above."""

    def choose(self, request: Request, victim: VictimView) -> Method:
        """The method for this victim."""
