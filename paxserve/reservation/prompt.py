"""Hold all tokens known when a request enters, whatever chunk is computed first; then grow.

Source: the block manager of vLLM V0 and of the Sarathi-Serve artifact allocates a prompt as a
whole at admission, so a prompt in chunks never runs short of memory in the middle. After that it
is `on_demand`.
"""

from dataclasses import dataclass

from paxserve.limits import Limits
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Prompt:
    """Promise the known tokens; a request that cannot grow makes the scheduler preempt."""

    grows = True
    needs_true_lengths = False
    is_exact = True

    def num_tokens(self, request: Request, *, num_needed: int, limits: Limits) -> int:
        """See `Reservation.num_tokens`."""
        return max(num_needed, request.trunk.num_known_tokens)
