"""Percentiles of more numbers than one wants to keep.

Owns: `LogHistogram`, and the same questions answered from all numbers (`Exact`). In: times >= 0.
Out: percentiles. Must not know: whose they are.

Source: Masson, Rim and Lee, "DDSketch", VLDB 2019: buckets whose bounds grow by a constant factor
gamma = (1 + e) / (1 - e); the middle of a bucket, 2 gamma^i / (gamma + 1), is within the share e of
every number in it. Differs: the range is fixed, so the buckets are an array.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

RELATIVE_ERROR = 0.005
_LEAST, _MOST = 1e-9, 1e9  # what lies outside counts as the bound that it lies beyond

type Floats = npt.NDArray[np.float64]


class Distribution(Protocol):
    """Numbers that can be asked for percentiles."""

    @property
    def count(self) -> int:
        """How many there are."""

    def percentile(self, share: float) -> float:
        """As `np.percentile`, between neighbours by their distance; `share` in percent."""


class Exact:
    """All numbers."""

    def __init__(self, values: Floats) -> None:
        self._values = values

    @property
    def count(self) -> int:
        """See `Distribution.count`."""
        return len(self._values)

    def percentile(self, share: float) -> float:
        """See `Distribution.percentile`."""
        return float(np.percentile(self._values, share))


class LogHistogram:
    """Invariant: `count` numbers were added, each in one bucket, zeros in the first.

    Percentiles are within the share `RELATIVE_ERROR` of those of all numbers.
    """

    def __init__(self) -> None:
        growth = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
        self._log_growth = np.log(growth)
        self._first = int(np.floor(np.log(_LEAST) / self._log_growth))
        last = int(np.ceil(np.log(_MOST) / self._log_growth))
        exponents = np.arange(self._first, last + 1, dtype=np.float64)
        self._middles = np.concatenate([[0.0], 2 * growth**exponents / (growth + 1)])
        self._counts = np.zeros(len(self._middles), np.int64)

    @property
    def count(self) -> int:
        """See `Distribution.count`."""
        return int(self._counts.sum())

    def add(self, values: Floats) -> None:
        """Count numbers >= 0."""
        inside = np.clip(values, _LEAST, _MOST)
        buckets = np.ceil(np.log(inside) / self._log_growth).astype(np.int64) - self._first + 1
        buckets[values <= 0] = 0
        self._counts += np.bincount(buckets, minlength=len(self._counts))

    def percentile(self, share: float) -> float:
        """See `Distribution.percentile`."""
        rank = share / 100 * (self.count - 1)
        low, high = self._value(int(rank)), self._value(int(np.ceil(rank)))
        return low + (high - low) * (rank - int(rank))

    def _value(self, rank: int) -> float:
        """The number of this rank, from 0."""
        return float(self._middles[np.searchsorted(np.cumsum(self._counts), rank, side="right")])
