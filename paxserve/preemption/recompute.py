"""Drop a victim's KV and compute it again when it resumes.

Source: vLLM, Kwon et al., SOSP'23, section 4.5. Prompt and output tokens are kept, so the
recomputation is one prompt-like pass over all of them.
"""

from dataclasses import dataclass

from paxserve.preemption import Method, VictimView
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Recompute:
    """Always recompute."""

    swaps = False

    def choose(self, request: Request, victim: VictimView) -> Method:
        """See `Preemption.choose`."""
        return Method.RECOMPUTE
