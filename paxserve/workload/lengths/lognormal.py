"""Lengths as chat has them: many short, few very long, prompts and outputs independent.

Source: fits to ShareGPT and arXiv lengths, as those of Sarathi-Serve (Agrawal et al., OSDI 2024),
table 2. As filters on data sets do, a pair that is too long in all is left out and drawn again.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paxserve.numbers import MOST_TOKENS, real, whole
from paxserve.workload.lengths import Length

MOST_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Attributes:

    median_input_tokens, median_output_tokens: half are longer, before long pairs are left out.
    sigma_input, sigma_output: standard deviation of the logarithm; 0 is always the median.
    max_total_tokens: most tokens of prompt and output together.
    """

    median_input_tokens: float
    sigma_input: float
    median_output_tokens: float
    sigma_output: float
    max_total_tokens: int

    def __post_init__(self) -> None:
        """Check each."""
        for part in ("input", "output"):
            name = f"median_{part}_tokens"
            real(name, getattr(self, name), low=1.0, high=MOST_TOKENS)
            real(f"sigma_{part}", getattr(self, f"sigma_{part}"), high=5.0)
        whole("max_total_tokens", self.max_total_tokens, low=2, high=MOST_TOKENS)

    def draw(self, num_requests: int, rng: np.random.Generator) -> list[Length]:
        """See `Lengths.draw`."""
        kept: list[Length] = []
        for _ in range(MOST_ROUNDS):
            inputs = self._tokens(self.median_input_tokens, self.sigma_input, num_requests, rng)
            outputs = self._tokens(self.median_output_tokens, self.sigma_output, num_requests, rng)
            fits = inputs + outputs <= self.max_total_tokens
            kept += map(Length, inputs[fits].tolist(), outputs[fits].tolist())
            if len(kept) >= num_requests:
                return kept[:num_requests]
        raise ValueError(
            f"hardly a pair of lengths is within max_total_tokens={self.max_total_tokens} with "
            f"median_input_tokens={self.median_input_tokens} and "
            f"median_output_tokens={self.median_output_tokens}: raise it or lower them"
        )

    def _tokens(
        self, median: float, sigma: float, size: int, rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        drawn = rng.lognormal(np.log(median), sigma, size=size)
        return np.clip(np.rint(drawn), 1, MOST_TOKENS).astype(np.int64)
