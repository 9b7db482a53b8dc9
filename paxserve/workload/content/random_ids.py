"""Random token ids: any length, nothing shared, no tokenizer.

Source: the random data set of `vllm bench serve`.
"""

from dataclasses import dataclass

from paxserve import draws
from paxserve.workload import Vocabulary


@dataclass(frozen=True, slots=True)
class RandomIds:
    """Uniform over the vocabulary."""

    num_turns = 1
    think_s = 0.0

    def token_ids(
        self, number: int, num_tokens: int, *, seed: int, vocabulary: Vocabulary
    ) -> tuple[int, ...]:
        """See `Content.token_ids`."""
        return draws.token_ids(
            num_tokens, vocabulary.size, seed=seed, kind=draws.Stream.CONTENT, number=number
        )
