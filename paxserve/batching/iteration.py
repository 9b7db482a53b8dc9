"""Iteration-level scheduling: every running request, and newcomers with their whole prompt.

Source: Orca, OSDI'22, Algorithm 1: by arrival, stopping at the first request whose reservation does
not fit; a running request is never held back. Differs from Orca in that a step has a token budget
too, and that with a reservation that grows (Orca's never does) a running request short of memory
preempts.
"""

from collections.abc import Generator
from dataclasses import dataclass

from paxserve.batching import Decodes, Grant, Proposal, Verdict, View


@dataclass(frozen=True, slots=True)
class Iteration:
    """The running requests first, then newcomers with all of their prompt."""

    release = "at_finish"
    whole_prompts = True
    is_steady = True

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """See `Batching.propose`."""
        yield Decodes(view.running)
        for request in view.waiting():
            verdict = yield Grant(request, request.num_remaining_tokens)
            if verdict.refused:
                break
