"""Prompt chunks and decodes in turn: after a step of prompts one of decodes, and so on.

Source: `simple_chunking_scheduler` of the Sarathi-Serve artifact (OSDI'24). The token budget is the
chunk (512 there). A turn of prompts holds those already begun; newcomers enter only if there is
none. If a turn has nothing to do, the other kind takes it.
"""

from collections.abc import Generator
from dataclasses import dataclass

from paxserve.batching import Decodes, Grant, Proposal, Verdict, View, is_prompt


@dataclass(frozen=True, slots=True)
class Alternating:
    """Prompts and decodes never share a step, and neither goes twice while the other can go."""

    release = "at_finish"
    whole_prompts = False
    is_steady = False  # it looks at the previous step

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """See `Batching.propose`."""
        decodes = [request for request in view.running if not is_prompt(request)]
        # A row's tokens come from the host unless they were sampled in it: a prompt, or a resume.
        was_prompts = view.previous is not None and any(row.tokens for row in view.previous.rows)
        if (was_prompts and decodes) or not (yield from self._prompts(view)):
            yield Decodes(decodes)

    def _prompts(self, view: View) -> Generator[Proposal, Verdict, int]:
        """Prompts begun, or else newcomers; the number of tokens granted."""
        begun = [request for request in view.running if is_prompt(request)]
        num_granted = 0
        for request in begun or view.waiting():
            num_tokens = min(request.num_remaining_tokens, max(view.budget_left, 1))
            verdict = yield Grant(request, num_tokens)
            if verdict.refused:
                break
            num_granted += verdict.num_tokens
        return num_granted
