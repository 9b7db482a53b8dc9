"""Admit if a share of what the running requests may still produce stays free for them.

Source: SGLang's `schedule_policy` (PrefillAdder) and its new-token ratio: it starts at 0.7, falls
in 600 steps to 0.14 of that, and rises when a request had to be retracted. Who entered in this step
counts in full. Differs: a preemption sets it back to its start instead of to an estimate from the
outputs so far.
"""

from dataclasses import dataclass
from typing import NamedTuple

from paxserve.admission import Seen
from paxserve.events import Kind
from paxserve.gate import MemoryView
from paxserve.numbers import MOST_TOKENS, real, whole
from paxserve.request import Request


class _Ratio(NamedTuple):
    """The state: the ratio now, and when it last fell."""

    value: float
    fell_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """Args:

    initial, minimum: where the ratio starts, and where it ends.
    decay_steps: in how many steps it falls from one to the other, by equal amounts.
    clip_tokens: nobody is expected to produce more than this many tokens.
    """

    initial: float = 0.7
    minimum: float = 0.098
    decay_steps: int = 600
    clip_tokens: int = 4096

    def __post_init__(self) -> None:
        """Check the fields."""
        real("initial", self.initial, high=1.0)
        real("minimum", self.minimum, high=1.0)
        if self.minimum > self.initial:
            raise ValueError(f"minimum={self.minimum} must not exceed initial={self.initial}")
        whole("decay_steps", self.decay_steps, low=1, high=MOST_TOKENS)
        whole("clip_tokens", self.clip_tokens, low=1, high=MOST_TOKENS)

    def init(self) -> _Ratio:
        """See `LearningGate.init`."""
        return _Ratio(self.initial)

    def observe(self, state: _Ratio, seen: Seen) -> _Ratio:
        """See `LearningGate.observe`; all that is served at one time is one step."""
        if seen.kind is Kind.PREEMPTED:
            return state._replace(value=self.initial)
        if seen.kind is Kind.SERVED and seen.time_s != state.fell_s:
            fall = (self.initial - self.minimum) / self.decay_steps
            return _Ratio(max(self.minimum, state.value - fall), seen.time_s)
        return state

    def refusal(self, state: _Ratio, request: Request, memory: MemoryView) -> str | None:
        """See `Gate.refusal`."""
        if not memory.running:
            return None
        kept = sum(
            [
                self._num_to_come(running) * (1 if _is_newcomer(running) else state.value)
                for running in memory.running
            ]
        )
        num_blocks = max(memory.num_needed, memory.num_needed_for_all)
        num_wanted = num_blocks * memory.block_size + self._num_to_come(request)
        num_free = memory.num_free * memory.block_size
        if num_wanted + kept <= num_free:
            return None
        return (
            f"token_ratio: {num_wanted} tokens, and {kept:.0f} for those that run at a ratio of "
            f"{state.value:.3f}, exceed {num_free} free slots"
        )

    def _num_to_come(self, request: Request) -> int:
        """Tokens that it may still produce, in all sequences that go on."""
        most = request.max_known_tokens - request.num_prompt_tokens - request.num_produced_tokens
        return min(most, self.clip_tokens) * len(request.live)


def _is_newcomer(running: Request) -> bool:
    """Whether this step samples for it: where prompts go first, it entered in this step."""
    sequence = running.trunk
    return sequence.num_known_tokens > len(sequence.token_ids)
