"""Copy a victim's blocks to the host, and back when it resumes.

Source: vLLM, Kwon et al., SOSP'23, section 4.5. There the host's space may grow to the size
of the device's; here it has a size of its own, and a victim that it cannot hold is recomputed.
"""

from dataclasses import dataclass

from paxserve.preemption import Method, VictimView
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Swap:
    """Always swap."""

    swaps = True

    def choose(self, request: Request, victim: VictimView) -> Method:
        """See `Preemption.choose`."""
        return Method.SWAP
