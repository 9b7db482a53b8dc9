"""Stall-free batching: decodes first, then prompts in chunks that fill the token budget.

Source: Sarathi-Serve, OSDI'24, Algorithm 3. Order: running decodes, prompts already begun, new
requests; each takes what the budget leaves. The paper's systems hold a whole prompt's memory from
its first chunk on: that is `reservation=prompt`. The two knobs are vLLM's, and off in the paper.
"""

from collections.abc import Generator
from dataclasses import dataclass

from paxserve.batching import (
    Decodes,
    Grant,
    Proposal,
    Verdict,
    View,
    check_chunk_limits,
    chunk_of,
    enter_in_chunks,
    split,
)


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """No decode ever waits for a prompt.

    long_prefill_token_threshold: most tokens of one prompt in a step; 0 is no limit.
    max_num_partial_prefills: most prompts begun and not finished at a time; 0 is no limit.
    """

    release = "at_finish"
    whole_prompts = False
    is_steady = True

    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0

    def __post_init__(self) -> None:
        """Check the knobs."""
        check_chunk_limits(
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_partial_prefills=self.max_num_partial_prefills,
        )

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """See `Batching.propose`."""
        threshold = self.long_prefill_token_threshold
        decodes, prompts = split(view.running)
        yield Decodes(decodes)
        for request in prompts:
            if not view.budget_left:
                break
            yield Grant(request, chunk_of(request, view, threshold))
        yield from enter_in_chunks(
            view, threshold=threshold, max_num_partial=self.max_num_partial_prefills
        )
