"""Independent users: a Poisson process.

Source: vLLM (Kwon et al., SOSP 2023), section 6.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paxserve.numbers import real


@dataclass(frozen=True, slots=True)
class Poisson:
    """`rate`: conversations per second."""

    rate: float

    think_s = 0.0

    def __post_init__(self) -> None:
        """Check the rate."""
        real("rate", self.rate, high=1e6, above=True)

    def starts(
        self, num_conversations: int, rng: np.random.Generator, recorded_s: Sequence[float] | None
    ) -> Sequence[float]:
        """See `Arrivals.starts`."""
        gaps = rng.exponential(1 / self.rate, size=num_conversations)
        times: list[float] = np.cumsum(gaps).tolist()
        return times
