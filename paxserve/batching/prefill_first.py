"""Prompts before decodes: a step holds whole prompts if any can enter, else one token for everyone.

Source: vLLM V0's default scheduler (`_schedule_default`, 2023-2025), the one that SOSP'23 measures.
The running requests wait while prompts go in. A request that was swapped out keeps newcomers
out; it comes back beside the decodes, in a step that preempted nobody.
Differs from V0 in that swapped-out requests stand in the one queue, in its order, not before it.
"""

from collections.abc import Generator
from dataclasses import dataclass

from paxserve.batching import Decodes, Grant, Proposal, Verdict, View


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Prompts and decodes never share a step."""

    release = "at_finish"
    whole_prompts = True
    is_steady = True

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """See `Batching.propose`."""
        if (yield from self._enter(view, swapped=False)):
            return
        verdict = yield Decodes(view.running)
        if not verdict.num_preempted:
            yield from self._enter(view, swapped=True)

    def _enter(self, view: View, *, swapped: bool) -> Generator[Proposal, Verdict, int]:
        """Admit from the head of the queue while it is of this kind; the number that entered."""
        num_entered = 0
        for request in view.waiting():
            if request.is_swapped is not swapped:
                break
            verdict = yield Grant(request, request.num_remaining_tokens)
            if verdict.refused:
                break
            num_entered += 1
        return num_entered
