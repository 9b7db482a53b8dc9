"""Times as recorded.

Source: the replay of production traces, as in Splitwise (Patel et al., ISCA 2024), section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paxserve.numbers import real
from paxserve.traces.counts import columns_of, read_counts


@dataclass(frozen=True, slots=True)
class Trace:
    """Attributes:

    path: a CSV file with a column TIMESTAMP or arrived_at_s; None: the workload's own trace.
    scale: factor on times; 0.5 doubles the rate, 0 lets all arrive at once.
    """

    path: str | None
    scale: float

    think_s = 0.0

    def __post_init__(self) -> None:
        """Check both."""
        if self.path is not None and not isinstance(self.path, str):
            raise ValueError(f"path must be the name of a file or null, got {self.path!r}")
        real("scale", self.scale, high=1e6)

    def starts(
        self, num_conversations: int, rng: np.random.Generator, recorded_s: Sequence[float] | None
    ) -> Sequence[float]:
        """See `Arrivals.starts`."""
        if self.path is not None:
            requests = read_counts(self.path, columns_of(self.path), limit=num_conversations)
            recorded_s = [r.arrival_s for r in requests if r.arrival_s is not None] or None
        if recorded_s is None:
            raise ValueError(
                f"arrivals=trace, but {self.path or 'this workload'} has no recorded times: choose "
                "other arrivals, or set workload.arrivals.path to a file that has"
            )
        if len(recorded_s) < num_conversations:
            raise ValueError(
                f"{self.path} has {len(recorded_s)} arrival times, {num_conversations} are needed"
            )
        return [self.scale * time_s for time_s in recorded_s[:num_conversations]]
