"""Admit if the most memory that those in the batch will ever hold together fits.

Source: Gong et al., ASPLOS'25 (Past-Future), section 3: remaining lengths are drawn from those of
requests that finished lately, given what a request has produced already; sorted by what remains,
the peak is at one of the ends. Differs: a request's draw is fixed by its id instead of made anew
each time, so a run can be repeated; where nobody finished later than where it is, it may go on to
its own limit; blocks count whole, and shared ones once per holder.

With known tokens k and remaining tokens r, longest remaining first:

    when the i-th ends, 1..i are left     M_i = k_1 + ... + k_i + i * r_i     peak = max M_i
"""

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paxserve.admission import Seen
from paxserve.events import Kind
from paxserve.gate import MemoryView
from paxserve.numbers import MOST_REQUESTS, whole
from paxserve.prediction import draw
from paxserve.request import FinishReason, Request


class _Past(NamedTuple):
    """The state: output lengths of the last finished requests, by time and by length."""

    recent: list[int]
    ordered: list[int]


@dataclass(frozen=True, slots=True)
class PastFuture:
    """`window`: how many of the last finished requests are looked at."""

    window: int = 1000

    def __post_init__(self) -> None:
        """Check the field."""
        whole("window", self.window, low=1, high=MOST_REQUESTS)

    def init(self) -> _Past:
        """See `LearningGate.init`."""
        return _Past([], [])

    def observe(self, state: _Past, seen: Seen) -> _Past:
        """See `LearningGate.observe`; outputs that were cut off from outside teach nothing."""
        request = seen.request
        if seen.kind is not Kind.FINISHED or request is None:
            return state
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = request.num_output_tokens // len(request.sequences)
            state.recent.append(length)
            insort(state.ordered, length)
            if len(state.recent) > self.window:
                oldest = state.recent.pop(0)
                del state.ordered[bisect_right(state.ordered, oldest) - 1]
        return state

    def refusal(self, state: _Past, request: Request, memory: MemoryView) -> str | None:
        """See `Gate.refusal`."""
        if not memory.running:
            return None
        peak = peak_blocks(
            [
                (len(sequence.token_ids), _num_remaining(state, each))
                for each in (*memory.running, request)
                for sequence in each.live
            ],
            memory.block_size,
        )
        if peak <= memory.num_usable:
            return None
        return (
            f"past_future: {len(memory.running) + 1} requests would come to hold {peak} blocks, "
            f"the pool has {memory.num_usable}"
        )


def peak_blocks(futures: list[tuple[int, int]], block_size: int) -> int:
    """The most blocks held at one time by sequences of (known, remaining) tokens that all go on."""
    known, remaining = np.array(sorted(futures, key=lambda future: -future[1])).T
    num_left = np.arange(1, len(futures) + 1)
    # Blocks of x slots are at most (x + block_size - 1) / block_size, for each sequence.
    slots = np.cumsum(known) + num_left * (remaining + block_size - 1)
    return int(slots.max()) // block_size


def _num_remaining(state: _Past, request: Request) -> int:
    """Output tokens still to come: the draw among finished outputs longer than its own."""
    produced = request.num_produced_tokens
    most = request.num_declared_tokens
    start = bisect_right(state.ordered, produced)
    num_longer = len(state.ordered) - start
    if not num_longer:
        return max(0, most - produced)
    length = state.ordered[start + int(draw(request.request_id) * num_longer)]
    return max(0, min(length, most) - produced)
