"""Burstier or more regular than Poisson: gaps from a gamma distribution.

Source: `vllm bench serve --burstiness`; as there, burstiness is the shape of the distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paxserve.numbers import real


@dataclass(frozen=True, slots=True)
class Gamma:
    """Attributes:

    rate: conversations per second.
    burstiness: 1 is Poisson, below 1 comes in bursts, above 1 more evenly; the coefficient of
        variation of the gaps is burstiness ** -0.5.
    """

    rate: float
    burstiness: float

    think_s = 0.0

    def __post_init__(self) -> None:
        """Check both."""
        real("rate", self.rate, high=1e6, above=True)
        real("burstiness", self.burstiness, low=1e-3, high=1e6)

    def starts(
        self, num_conversations: int, rng: np.random.Generator, recorded_s: Sequence[float] | None
    ) -> Sequence[float]:
        """See `Arrivals.starts`."""
        scale_s = 1 / (self.rate * self.burstiness)
        gaps = rng.gamma(self.burstiness, scale_s, size=num_conversations)
        times: list[float] = np.cumsum(gaps).tolist()
        return times
