"""Everything arrives at the start: offline batches, and the most load there can be.

Source: the throughput benchmark of vLLM (request rate "inf").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """All at time 0."""

    think_s = 0.0

    def starts(
        self, num_conversations: int, rng: np.random.Generator, recorded_s: Sequence[float] | None
    ) -> Sequence[float]:
        """See `Arrivals.starts`."""
        return [0.0] * num_conversations
