"""One token pool without phases: running requests in order, then waiting ones in order.

Source: vLLM V1, `v1/core/sched/scheduler.py` (0.32): each running request takes what it has left
to compute and the budget allows, be that a chunk or one token; at the first that gets nothing,
nobody behind it is looked at. Nobody is admitted in a step that preempted.
Differs from V1 in that decodes that stand side by side are granted as one list, in which those
behind a request that preempted itself go on: under `victim=newest` nobody is behind it.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import groupby

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
class RunningFirst:
    """Whoever runs is served in order of admission, decode or chunk.

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
        num_preempted = 0
        for proposal in self._in_order(view):
            verdict = yield proposal
            num_preempted += verdict.num_preempted
            if verdict.refused:
                break
        if not num_preempted:
            yield from enter_in_chunks(
                view,
                threshold=self.long_prefill_token_threshold,
                max_num_partial=self.max_num_partial_prefills,
            )

    def _in_order(self, view: View) -> Iterable[Proposal]:
        """What the running requests ask for, each made when the one before it is answered."""
        running = view.running
        if not split(running)[1]:
            yield Decodes(running)
            return
        for is_decode, group in groupby(running, lambda request: request.is_decode):
            if is_decode:
                yield Decodes(list(group))
            else:
                for request in group:
                    yield Grant(request, chunk_of(request, view, self.long_prefill_token_threshold))
