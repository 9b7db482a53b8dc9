"""Hold the prompt, and the true output length rounded up to a power of two.

Source: "Orca (Pow2)" of Kwon et al., SOSP'23, section 6.1: a system that over-reserves the output
at most twice; an output of 25 tokens gets room for 32. The prompt is not rounded.
"""

from dataclasses import dataclass

from paxserve.limits import Limits
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Pow2:
    """Promise prompt + 2^k >= true output tokens, at most `max_model_len`."""

    grows = False
    needs_true_lengths = True
    is_exact = True

    def num_tokens(self, request: Request, *, num_needed: int, limits: Limits) -> int:
        """See `Reservation.num_tokens`."""
        num_output = request.origin.num_true_output_tokens
        assert num_output is not None, request.request_id
        rounded = 1 << max(num_output - 1, 0).bit_length()
        return max(num_needed, min(request.num_prompt_tokens + rounded, limits.max_model_len))
