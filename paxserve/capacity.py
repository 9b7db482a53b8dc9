"""The highest rate that keeps a service level.

Owns: the search, and what is concluded from its probes. Pure. In: a function that measures a rate.
Out: a `Capacity`. Must not know: what is measured, and how.

    bracket: from `start` up by doubling while the SLO is met, down by halving while it is not;
    bisect (geometrically) until the two ends are within the tolerance of each other.

It takes for granted that a higher rate does not help; `is_monotone` says whether the probes agree.
Two searches end before their limits: upwards, when twice as many arrivals twice in a row bring no
more output (the server is saturated, and what is met now stays met); downwards, when half the rate
halves the throughput and leaves alone what was not met (requests no longer meet each other).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paxserve.metrics import Summary
from paxserve.numbers import real
from paxserve.service_level import Bound, Slo

THROUGHPUT, GROWTH = "output_throughput", "queue_growth"
HIGHEST_RATE = 1e6
LOWEST_TOLERANCE = 1e-4
_DIGITS = 6  # of a rate: far finer than any tolerance
_NO_MORE = 1.02  # factor of throughput that is not "more"
_UNCHANGED = 0.01  # relative change of a figure that is none
_FOLLOWS = 0.6  # a throughput that falls to this when the rate is halved follows the rate
_GROWS = 0.02  # s per s: arrivals exceed what is served by 2 %
_RANGE = 1.1  # factor of rates over which output must be flat

type Measure = Callable[[float], Summary]


class Outcome(StrEnum):
    """Of a search."""

    FOUND = "found"
    NO_RATE = "no rate meets it"
    EVERY_RATE = "every rate meets it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A rate, what was measured, and which bounds it breaks."""

    rate: float
    figures: Summary
    unmet: tuple[Bound, ...]

    @property
    def is_met(self) -> bool:
        """Whether the SLO is."""
        return not self.unmet

    @property
    def queue_grows(self) -> bool:
        """Whether requests arrive faster than they are served, to the end; needs `queue_growth`."""
        growth = self.figures.get(GROWTH)
        return growth is not None and growth > _GROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """From `rate` on more requests bring no more output, and the queue grows to the end."""

    rate: float
    output_throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a search has found.

    `rate` is the highest that was measured and meets the SLO, `broken_at` the lowest above it that
    does not, None where there is none; if both are there, they are within `tolerance` of each
    other. `probes` are in order of rate.
    """

    outcome: Outcome
    slo: Slo
    tolerance: float
    rate: float | None
    broken_at: float | None
    probes: tuple[Probe, ...]

    @property
    def is_monotone(self) -> bool:
        """Whether every rate below one that meets the SLO meets it."""
        met = [probe.is_met for probe in self.probes]
        return met == sorted(met, reverse=True)

    @property
    def is_saturated(self) -> bool:
        """Whether the queue still grows at `rate`: then a longer workload has a lower capacity."""
        return any(probe.queue_grows for probe in self.probes if probe.rate == self.rate)

    @property
    def saturation(self) -> Saturation | None:
        """None if no probe was beyond it."""
        return _saturation(self.probes)

    def answer(self) -> str:
        """A sentence or two."""
        lowest, highest = self.probes[0], self.probes[-1]
        if self.outcome is Outcome.FOUND:
            said = f"{self.slo} is met up to {self.rate:g}/s, and no longer at {self.broken_at:g}/s"
        elif self.outcome is Outcome.EVERY_RATE:
            said = f"{self.slo} is met at every rate tried, up to {highest.rate:g}/s"
        else:
            values = ", ".join(f"{b.name} is {lowest.figures[b.name]:.4g}" for b in lowest.unmet)
            said = f"no rate meets {self.slo}: at {lowest.rate:g}/s {values}"
        doubt = "; the queue grows there: with more requests it would be lower"
        return f"{said}{doubt if self.is_saturated else ''}; {self._end()}"

    def _end(self) -> str:
        found = self.saturation
        if found is None:
            return f"no saturation was seen up to {self.probes[-1].rate:g}/s"
        return (
            f"saturated from {found.rate:g}/s on, at {found.output_throughput:.1f} output tokens/s"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is undefined is None, never NaN."""
        found = self.saturation
        return {
            "outcome": str(self.outcome),
            "slo": [str(bound) for bound in self.slo.bounds],
            "slo_per_request": self.slo.per_request.given,
            "rate": self.rate,
            "broken_at": self.broken_at,
            "tolerance": self.tolerance,
            "is_monotone": self.is_monotone,
            "is_saturated": self.is_saturated,
            "saturation": found
            and {"rate": found.rate, "output_throughput": found.output_throughput},
            "probes": [
                {
                    "rate": probe.rate,
                    "is_met": probe.is_met,
                    "unmet": [str(bound) for bound in probe.unmet],
                    **probe.figures,
                }
                for probe in self.probes
            ],
        }


def search(
    measure: Measure,
    slo: Slo,
    *,
    tolerance: float = 0.02,
    start: float = 1.0,
    lowest: float | None = None,
    highest: float | None = None,
    on_probe: Callable[[Probe], None] = lambda probe: None,
) -> Capacity:
    """Find the highest rate that meets an SLO.

    Args:
        measure: from a rate, per second, to the figures of a run; asked once per rate. Beside those
            that the SLO bounds it should give `output_throughput` and `request_throughput`, and
            `queue_growth`, without which saturation is not seen.
        slo: what is to be met.
        tolerance: relative distance of the two ends at which the search stops.
        start: the first rate.
        lowest, highest: rates beyond which nothing is tried; default: `start` / 1024, * 1024. All
            rates have 6 digits, these and `start` too.
        on_probe: called after each measurement.

    Raises:
        ValueError: limits in the wrong order, or a figure that is bounded and undefined.
    """
    real("tolerance", tolerance, low=LOWEST_TOLERANCE, high=1)
    real("start", start, high=HIGHEST_RATE, above=True)
    lowest = start / 1024 if lowest is None else lowest
    highest = min(1024 * start, HIGHEST_RATE) if highest is None else highest
    real("lowest rate", lowest, high=start, above=True)
    real("highest rate", highest, low=start, high=HIGHEST_RATE)
    found = _Search(measure, slo, tolerance, on_probe)
    low, high = found.bracket(_rounded(start), _rounded(lowest), _rounded(highest))
    if low is not None and high is not None:
        low, high = found.bisect(low, high)
    outcome = Outcome.FOUND if low and high else Outcome.EVERY_RATE if low else Outcome.NO_RATE
    return Capacity(
        outcome=outcome,
        slo=slo,
        tolerance=tolerance,
        rate=None if low is None else low.rate,
        broken_at=None if high is None else high.rate,
        probes=tuple(probe for _, probe in sorted(found.probes.items())),
    )


class _Search:
    def __init__(
        self, measure: Measure, slo: Slo, tolerance: float, on_probe: Callable[[Probe], None]
    ) -> None:
        self._measure, self._slo, self._on_probe = measure, slo, on_probe
        self._tolerance = tolerance
        self.probes: dict[float, Probe] = {}

    def bracket(
        self, start: float, lowest: float, highest: float
    ) -> tuple[Probe | None, Probe | None]:
        """A rate that meets the SLO and one that does not, or one of them alone."""
        probe = self._probe(start)
        return self._up(probe, highest) if probe.is_met else self._down(probe, lowest)

    def _up(self, met: Probe, highest: float) -> tuple[Probe, Probe | None]:
        """`highest` is rounded as rates are, and so is reached."""
        num_flat = 0
        while met.rate < highest and num_flat < 2:
            probe = self._probe(min(2 * met.rate, highest))
            if not probe.is_met:
                return met, probe
            num_flat = num_flat + 1 if _has_no_more(met, probe) else 0
            met = probe
        return met, None

    def _down(self, unmet: Probe, lowest: float) -> tuple[Probe | None, Probe]:
        """`lowest` is rounded as rates are, and so is reached."""
        while unmet.rate > lowest:
            probe = self._probe(max(unmet.rate / 2, lowest))
            if probe.is_met:
                return probe, unmet
            if _is_alone(unmet, probe):
                return None, probe
            unmet = probe
        return None, unmet

    def bisect(self, met: Probe, unmet: Probe) -> tuple[Probe, Probe]:
        """Both ends, within the tolerance of each other."""
        while unmet.rate > met.rate * (1 + self._tolerance):
            probe = self._probe(math.sqrt(met.rate * unmet.rate))
            met, unmet = (probe, unmet) if probe.is_met else (met, probe)
        return met, unmet

    def _probe(self, rate: float) -> Probe:
        """Of a rate that a later search, even a finer one, asks for again."""
        rate = _rounded(rate)
        figures = self._measure(rate)
        try:
            unmet = self._slo.unmet(figures)
        except ValueError as error:
            raise ValueError(f"at rate {rate:g}: {error}") from error
        probe = Probe(rate=rate, figures=figures, unmet=unmet)
        self.probes[rate] = probe
        self._on_probe(probe)
        return probe


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")


def _has_no_more(slower: Probe, faster: Probe) -> bool:
    before, after = slower.figures.get(THROUGHPUT), faster.figures.get(THROUGHPUT)
    return before is not None and after is not None and after <= _NO_MORE * before


def _is_alone(faster: Probe, slower: Probe) -> bool:
    """Whether throughput follows the rate, and what is unmet does not."""
    before, after = (p.figures.get("request_throughput") for p in (faster, slower))
    if not before or after is None or after > _FOLLOWS * before:
        return False
    return all(_is_same(slower.figures, faster.figures, bound.name) for bound in slower.unmet)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return bool(abs(one[name] - other[name]) <= _UNCHANGED * abs(other[name]))


def _saturation(probes: Sequence[Probe]) -> Saturation | None:
    outputs = [probe.figures.get(THROUGHPUT) or 0.0 for probe in probes]
    peak = max(outputs, default=0.0)
    if not peak:
        return None
    first = len(probes)
    while first and outputs[first - 1] * _NO_MORE >= peak and probes[first - 1].queue_grows:
        first -= 1
    if first == len(probes) or probes[-1].rate < _RANGE * probes[first].rate:
        return None
    return Saturation(rate=probes[first].rate, output_throughput=peak)
