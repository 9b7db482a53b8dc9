"""Continuous batching as it is taught: admit while memory permits, then one token for everyone.

Source: iteration-level scheduling, Orca (OSDI'22, Algorithm 1), over PagedAttention's memory and
preemption (SOSP'23, section 4.5). Newcomers enter with their whole prompt, beside the decodes.
Differs from vLLM, which admits nobody in a step that preempts: here a newcomer whose memory the
running requests turn out to need is held back again within the step.
"""

from collections.abc import Generator
from dataclasses import dataclass

from paxserve.batching import Decodes, Grant, Proposal, Verdict, View


@dataclass(frozen=True, slots=True)
class Textbook:
    """Newcomers first, then every running request grows by one token.

    One token of the budget is kept for each sequence that was already running.
    """

    release = "at_finish"
    whole_prompts = True
    is_steady = True

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """See `Batching.propose`."""
        incumbents = view.running
        num_kept = sum([len(request.live) for request in incumbents])
        for request in view.waiting():
            verdict = yield Grant(request, request.num_remaining_tokens, num_kept=num_kept)
            if verdict.refused:
                break
        yield Decodes(incumbents)
