"""How many tokens of memory a request is promised: the protocol of the reservation axis.

Pure: a reservation answers a question and owns nothing. Where the memory lies is the placement's.
"""

from typing import Protocol

from paxserve.limits import Limits
from paxserve.request import Request


class Reservation(Protocol):
    """`grows`: a request may ask for more than it was first promised, and may be refused.
    `needs_true_lengths`: it reads `request.origin.num_true_output_tokens`, so every request must
    bring it; one that does not is refused at the door.

    It may also declare `is_exact = True`: a request that decodes beyond what it was promised is
    promised what it needs and no more. See `Batching.is_steady`.
    """

    grows: bool
    needs_true_lengths: bool

    def num_tokens(self, request: Request, *, num_needed: int, limits: Limits) -> int:
        """Tokens to hold per sequence of `request`, at least `num_needed`."""
