"""Outputs drawn, with replacement, from a file; prompts log-normal around a mean, and independent.

For data sets of which only answers were measured. Source: the prompts of Alpaca in vLLM (Kwon et
al., SOSP 2023), figure 11b, have a mean of 19.31 tokens and a narrow peak from 8 to 30; with the
defaults nine in ten are of 10 to 32.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paxserve.numbers import MOST_TOKENS, real, whole, whole_text
from paxserve.traces.csv_file import read_csv
from paxserve.traces.text_file import stamp_of
from paxserve.workload.lengths import Length


@dataclass(frozen=True, slots=True)
class KnownOutputs:
    """Attributes:

    path, column: a CSV file, and its column that has numbers of output tokens.
    scale_output: factor on them, between tokenizers.
    mean_input_tokens: of prompts.
    sigma_input: standard deviation of their logarithm; 0 is always the mean.
    max_total_tokens: outputs are cut back to it, and prompts to leave them one token.
    """

    path: str
    column: str
    scale_output: float
    mean_input_tokens: float
    sigma_input: float
    max_total_tokens: int

    def __post_init__(self) -> None:
        """Check each."""
        for name in ("path", "column"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a name, got {getattr(self, name)!r}")
        real("scale_output", self.scale_output, high=1e3, above=True)
        real("mean_input_tokens", self.mean_input_tokens, low=1.0, high=MOST_TOKENS)
        real("sigma_input", self.sigma_input, high=5.0)
        whole("max_total_tokens", self.max_total_tokens, low=2, high=MOST_TOKENS)

    def draw(self, num_requests: int, rng: np.random.Generator) -> list[Length]:
        """See `Lengths.draw`."""
        known = _known(self.path, stamp_of(self.path), self.column)
        outputs = known[rng.integers(len(known), size=num_requests)]
        median = np.log(self.mean_input_tokens) - self.sigma_input**2 / 2
        inputs = rng.lognormal(median, self.sigma_input, size=num_requests)
        inputs = np.clip(np.rint(inputs), 1, self.max_total_tokens - 1)
        scaled = np.maximum(1, np.rint(outputs * self.scale_output))
        pairs = np.stack([inputs, np.minimum(scaled, self.max_total_tokens - inputs)], axis=1)
        return [Length(*pair) for pair in pairs.astype(np.int64).tolist()]


@lru_cache(maxsize=2)
def _known(path: str, stamp: int, column: str) -> npt.NDArray[np.int64]:
    """The column's numbers. Runs of one process read a file once."""
    known = [
        whole_text(f"{place}: {column}", text, low=1, high=MOST_TOKENS)
        for place, (text,) in read_csv(path, [column])
    ]
    if not known:
        raise ValueError(f"{path} has no rows")
    return np.array(known)
