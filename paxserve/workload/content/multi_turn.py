"""Conversations: each prompt is the one before, its real answer, and something new.

Source: the multi-turn workloads of SGLang (Zheng et al., NeurIPS 2024), section 6; there answers
were recorded, here they are those of the run itself.
"""

from dataclasses import dataclass

from paxserve import draws
from paxserve.numbers import MOST_REQUESTS, MOST_S, real, whole
from paxserve.workload import Vocabulary


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Attributes:

    num_turns: requests per conversation; lengths are those of each turn's new tokens.
    think_s: from the end of an answer to the next turn.
    """

    num_turns: int
    think_s: float

    def __post_init__(self) -> None:
        """Check both."""
        whole("num_turns", self.num_turns, low=1, high=MOST_REQUESTS)
        real("think_s", self.think_s, high=MOST_S)

    def token_ids(
        self, number: int, num_tokens: int, *, seed: int, vocabulary: Vocabulary
    ) -> tuple[int, ...]:
        """See `Content.token_ids`."""
        return draws.token_ids(
            num_tokens, vocabulary.size, seed=seed, kind=draws.Stream.CONTENT, number=number
        )
