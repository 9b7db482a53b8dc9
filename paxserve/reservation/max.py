"""Hold the longest a request could ever be, from its first step on.

Source: "Orca (Max)" of Kwon et al., SOSP'23, section 6.1, and FasterTransformer before it: the
output length is unknown, so room for the model's whole length is set aside.
"""

from dataclasses import dataclass

from paxserve.limits import Limits
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Max:
    """Promise `max_model_len` tokens; no request is ever short of memory later."""

    grows = False
    needs_true_lengths = False
    is_exact = True

    def num_tokens(self, request: Request, *, num_needed: int, limits: Limits) -> int:
        """See `Reservation.num_tokens`."""
        return limits.max_model_len
