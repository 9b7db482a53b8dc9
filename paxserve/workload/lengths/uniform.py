"""Lengths uniform between two bounds, prompts and outputs independent.

Source: the synthetic trace of Orca (Yu et al., OSDI 2022), section 6.2: prompts 32 to 512 tokens,
outputs 1 to 128.
"""

from dataclasses import dataclass

import numpy as np

from paxserve.numbers import MOST_TOKENS, whole
from paxserve.workload.lengths import Length


@dataclass(frozen=True, slots=True)
class Uniform:
    """Bounds, inclusive."""

    min_input_tokens: int
    max_input_tokens: int
    min_output_tokens: int
    max_output_tokens: int

    def __post_init__(self) -> None:
        """Check that there is something between them."""
        for part in ("input", "output"):
            low, high = getattr(self, f"min_{part}_tokens"), getattr(self, f"max_{part}_tokens")
            whole(f"min_{part}_tokens", low, low=1, high=MOST_TOKENS)
            whole(f"max_{part}_tokens", high, low=low, high=MOST_TOKENS)

    def draw(self, num_requests: int, rng: np.random.Generator) -> list[Length]:
        """See `Lengths.draw`."""
        inputs = rng.integers(self.min_input_tokens, self.max_input_tokens + 1, size=num_requests)
        outputs = rng.integers(
            self.min_output_tokens, self.max_output_tokens + 1, size=num_requests
        )
        return list(map(Length, inputs.tolist(), outputs.tolist()))
