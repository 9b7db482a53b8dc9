"""Stall-free batching: decodes first, then prompts in chunks that fill the token budget.

Source: Sarathi-Serve, OSDI'24, Algorithm 3. Order: running decodes, prompts already begun, new
requests; each takes what the budget leaves.
"""

from collections.abc import Generator
from dataclasses import dataclass

from paxserve.batching import Decodes, Grant, Proposal, Verdict, View, split


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """No decode ever waits for a prompt."""

    release = "at_finish"
    whole_prompts = False

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """See `Batching.propose`."""
        decodes, prompts = split(view.running)
        yield Decodes(decodes)
        for request in prompts:
            num_tokens = min(request.num_remaining_tokens, view.budget_left)
            if num_tokens:
                yield Grant(request, num_tokens)
        for request in view.waiting():
            num_tokens = min(request.num_remaining_tokens, max(view.budget_left, 1))
            verdict = yield Grant(request, num_tokens)
            if verdict.refused:
                break
