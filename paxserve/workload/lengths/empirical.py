"""Lengths drawn, with replacement, from a file: prompts and outputs keep together.

Source: vLLM (Kwon et al., SOSP 2023), section 6.1, takes ShareGPT lengths with a total of at most
2048. The factors bridge tokenizers: 1.043 and 1.063 turn Llama's means into those of OPT there.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paxserve.numbers import real
from paxserve.traces.counts import columns_of, read_counts
from paxserve.traces.length_filter import LengthFilter
from paxserve.traces.text_file import stamp_of
from paxserve.workload.lengths import Length


@dataclass(frozen=True, slots=True)
class Empirical:
    """Attributes:

    path: a CSV file with columns ContextTokens and GeneratedTokens (Azure, NanoFlow), or
        num_prefill_tokens and num_decode_tokens (Vidur).
    min_tokens, max_input_tokens, max_total_tokens: rows outside are left out; None is no limit.
    scale_input, scale_output: factors on lengths, after rows were left out; what they push beyond
        max_total_tokens is cut back to it.
    """

    path: str
    min_tokens: int
    max_input_tokens: int | None
    max_total_tokens: int | None
    scale_input: float
    scale_output: float

    def __post_init__(self) -> None:
        """Check each."""
        if not isinstance(self.path, str):
            raise ValueError(f"path must be the name of a file, got {self.path!r}")
        self._filter()
        real("scale_input", self.scale_input, high=1e3, above=True)
        real("scale_output", self.scale_output, high=1e3, above=True)

    def draw(self, num_requests: int, rng: np.random.Generator) -> list[Length]:
        """See `Lengths.draw`."""
        kept = _kept(self.path, stamp_of(self.path), self._filter())
        drawn = kept[rng.integers(len(kept), size=num_requests)]
        scaled = np.maximum(1, np.rint(drawn * (self.scale_input, self.scale_output)))
        if self.max_total_tokens is not None:
            inputs = np.minimum(scaled[:, 0], self.max_total_tokens - 1)
            outputs = np.minimum(scaled[:, 1], self.max_total_tokens - inputs)
            scaled = np.stack([inputs, outputs], axis=1)
        return [Length(*pair) for pair in scaled.astype(np.int64).tolist()]

    def _filter(self) -> LengthFilter:
        return LengthFilter(self.min_tokens, self.max_input_tokens, self.max_total_tokens)


@lru_cache(maxsize=2)
def _kept(path: str, stamp: int, bounds: LengthFilter) -> npt.NDArray[np.int64]:
    """Pairs of lengths within the bounds. Runs of one process read a file once."""
    rows = read_counts(path, columns_of(path))
    kept = [
        (known.num_prompt_tokens, known.num_output_tokens)
        for known in rows
        if bounds.keeps(known.num_prompt_tokens, known.num_output_tokens)
    ]
    if not kept:
        raise ValueError(f"none of the {len(rows)} rows of {path} is within the bounds")
    return np.array(kept)
