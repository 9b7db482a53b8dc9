"""Recompute or swap, whichever is estimated to take less time.

Source: the trade that Kwon et al., SOSP'23, section 7.3 measures (Fig. 19a) and leaves to the
operator; here it is made victim by victim. Swapping is bytes and transfers, so small blocks make it
slow, while recomputing does not depend on them.

The defaults are a fit to Fig. 19a, OPT-13B on an A100: out and in take 137, 89, 61, 47, 40, 37, 35,
34, 33.5 ms at block sizes 1, 2, 4 ... 256, recomputing about 38 ms at each. How many tokens that is
the paper does not print; 1024 is assumed, which makes the large blocks' two copies 25 GB/s each,
what PCIe 4 gives. With them full blocks of 16 are recomputed and full blocks of 32 are swapped.
"""

from dataclasses import dataclass, fields

from paxserve.preemption import Method, VictimView
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Cheapest:
    """Attributes:

    recompute_s_per_token: seconds per computed token that is lost.
    swap_s_per_token: seconds to copy one token's KV out and back in.
    swap_s_per_block: what the two transfers of a block cost beside its bytes.
    """

    recompute_s_per_token: float = 37e-6
    swap_s_per_token: float = 32.6e-6
    swap_s_per_block: float = 105e-6

    swaps = True

    def __post_init__(self) -> None:
        """Refuse what is no duration."""
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 60:
                raise ValueError(
                    f"{field.name} must be a number of seconds from 0 to 60, got {value!r}"
                )

    def choose(self, request: Request, victim: VictimView) -> Method:
        """See `Preemption.choose`; recompute when both take as long, it needs no host memory."""
        recompute_s = victim.num_computed_tokens * self.recompute_s_per_token
        swap_s = (
            victim.num_computed_tokens * self.swap_s_per_token
            + victim.num_blocks * self.swap_s_per_block
        )
        return Method.SWAP if swap_s < recompute_s else Method.RECOMPUTE
