"""Keep a share of the blocks free when admitting, so that those who run can grow.

Source: vLLM V0's block manager (`watermark`, 0.01; `can_allocate`). Differs: a request that needs
the kept blocks but stands alone enters, where vLLM refuses it for ever.
"""

from dataclasses import dataclass

from paxserve.gate import MemoryView
from paxserve.numbers import real
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Watermark:
    """`share` of the usable blocks, rounded down, stays free."""

    share: float = 0.01

    def __post_init__(self) -> None:
        """Check the field."""
        real("share", self.share, high=1.0)

    def refusal(self, state: None, request: Request, memory: MemoryView) -> str | None:
        """See `Gate.refusal`."""
        num_kept = int(self.share * memory.num_usable)
        if not memory.running or memory.num_free - memory.num_needed >= num_kept:
            return None
        return (
            f"watermark: {memory.num_needed} of {memory.num_free} free blocks would leave fewer "
            f"than {num_kept}"
        )
