"""Request-level batching: a batch is formed, runs until its last member ends, and dissolves.

Source: the baseline of Orca (OSDI'22, section 2) and of vLLM (SOSP'23, section 6.1), as in
FasterTransformer or a plain `generate` call: the earliest requests, as many as rows and memory
allow. A finished member keeps its row and memory, dead, until the batch dissolves.
Differs from those systems in that dead rows are not computed, only counted; and with a reservation
that grows (theirs is `max`) a member short of memory is preempted and joins the next batch.
"""

from collections.abc import Generator
from dataclasses import dataclass

from paxserve.batching import Admit, Decodes, Grant, Proposal, Verdict, View, is_prompt


@dataclass(frozen=True, slots=True)
class Static:
    """Form, prompts first, decode, dissolve."""

    release = "with_batch"
    whole_prompts = True
    is_steady = True

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """See `Batching.propose`."""
        if not view.running:
            for request in view.waiting():
                verdict = yield Admit(request, request.num_remaining_tokens)
                if verdict.refused:
                    break
        prompts = [request for request in view.running if is_prompt(request)]
        num_granted = 0
        for request in prompts:
            verdict = yield Grant(request, request.num_remaining_tokens)
            if verdict.refused:
                break
            num_granted += verdict.num_tokens
        if not num_granted:
            yield Decodes([request for request in view.running if not is_prompt(request)])
