"""Hold exactly what the request will come to use, known from its trace.

Source: "Orca (Oracle)" of Kwon et al., SOSP'23, section 6.1: the unreachable best of a reservation
that never grows. One slot less than its tokens: the KV of the last one is never written.
"""

from dataclasses import dataclass

from paxserve.limits import Limits
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Oracle:
    """Promise prompt + true output - 1 tokens, and never more than `max_model_len` allows."""

    grows = False
    needs_true_lengths = True
    is_exact = True

    def num_tokens(self, request: Request, *, num_needed: int, limits: Limits) -> int:
        """See `Reservation.num_tokens`."""
        num_output = request.origin.num_true_output_tokens
        assert num_output is not None, request.request_id
        length = min(request.num_prompt_tokens + num_output, limits.max_model_len)
        return max(num_needed, length - 1)
