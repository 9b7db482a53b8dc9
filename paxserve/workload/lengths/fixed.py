"""Every request of the same length: nothing is random that one does not study."""

from dataclasses import dataclass

import numpy as np

from paxserve.numbers import MOST_TOKENS, whole
from paxserve.workload.lengths import Length


@dataclass(frozen=True, slots=True)
class Fixed:
    """Tokens of prompt and output."""

    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        """Check both."""
        whole("input_tokens", self.input_tokens, low=1, high=MOST_TOKENS)
        whole("output_tokens", self.output_tokens, low=1, high=MOST_TOKENS)

    def draw(self, num_requests: int, rng: np.random.Generator) -> list[Length]:
        """See `Lengths.draw`."""
        return [Length(self.input_tokens, self.output_tokens)] * num_requests
