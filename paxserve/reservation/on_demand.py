"""Hold what is used now, and grow block by block.

Source: PagedAttention, Kwon et al., SOSP'23, section 4.3.
"""

from dataclasses import dataclass

from paxserve.limits import Limits
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class OnDemand:
    """Promise nothing ahead; a request that cannot grow makes the scheduler preempt."""

    grows = True
    needs_true_lengths = False
    is_exact = True

    def num_tokens(self, request: Request, *, num_needed: int, limits: Limits) -> int:
        """See `Reservation.num_tokens`."""
        return num_needed
