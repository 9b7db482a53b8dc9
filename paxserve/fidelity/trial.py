"""A workload on the device and simulated, turn by turn, and how far the figures are apart.

Owns: the order of the runs, and what is allowed. In: a `Bench`, and costs for each turn. Out: a
`Trial`. Must not know: where the costs come from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from paxserve.cost_model import Costs
from paxserve.experiment import Run
from paxserve.fidelity.bench import Bench
from paxserve.fidelity.comparing import Likeness, likeness
from paxserve.fidelity.pacing import Paced, last_arrival_s
from paxserve.metrics import Summary
from paxserve.workload import Source

FIGURES = ("median_ttft_ms", "median_tpot_ms", "median_e2el_ms", "output_throughput")
ALLOWED = 0.1
SPREADS = 2.0  # so many run-to-run spreads are allowed where that is more


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of all runs. Everything below is relative to the median of the real runs."""

    name: str
    real: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        """Of the real and the simulated runs."""
        return float(np.median(self.real)), float(np.median(self.simulated))

    @property
    def error(self) -> float:
        """Of the median of the simulated runs."""
        real, simulated = self.medians
        return simulated / real - 1

    @property
    def spread(self) -> float:
        """Standard deviation of the real runs; 0 of a single one."""
        if len(self.real) < 2:
            return 0.0
        return float(np.std(self.real, ddof=1) / np.median(self.real))

    @property
    def allowed(self) -> float:
        """The error that may be."""
        return max(ALLOWED, SPREADS * self.spread)

    @property
    def holds(self) -> bool:
        """Whether it is no more than that."""
        return abs(self.error) <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """retold: the last real run, held against the simulated engine with the readings of its clock.
    timed: relative errors of figures of that run, on a virtual clock with its step times and the
    host's gaps between them: what is left when the cost model is perfect. real, simulated:
    summaries, run by run. capacity: requests per second when all are there at once; None where
    nobody asked.
    """

    compared: tuple[Compared, ...]
    retold: Likeness
    timed: Mapping[str, float]
    real: tuple[Summary, ...]
    simulated: tuple[Summary, ...]
    capacity: float | None

    @property
    def holds(self) -> bool:
        """Whether every figure is near enough, and the retold run equal."""
        return self.retold.is_equal and all(one.holds for one in self.compared)


def hold_trial(
    bench: Bench, costs: Callable[[int], Costs], *, repeats: int, load: float | None
) -> Trial:
    """Run it.

    Args:
        bench: nothing else uses its executor.
        costs: of simulated steps in turn 0, 1, ...; asked before the turn's real run.
        repeats: turns.
        load: arrivals are spread so that they come at this share of the rate at which the engine
            serves them when all are there at once; None: as the workload says.

    Raises:
        ValueError: a workload that waits for answers, under a `load`; or one with no figure to
            compare.
    """
    capacity, factor = None, 1.0
    if load is not None:
        spread_s = _spread_s(bench)
        capacity = _throughput(bench.real(Paced(bench.prepared.open_source(), 0.0)))
        factor = bench.prepared.source.num_requests / (load * capacity) / spread_s

    def source() -> Source:
        return Paced(bench.prepared.open_source(), factor)

    real, simulated = [], []
    for turn in range(repeats):
        of_turn = costs(turn)
        last = bench.real(source())
        real.append(last.summary)
        simulated.append(bench.simulated(of_turn, last, source()).summary)
    return Trial(
        compared=tuple([_compared(name, real, simulated) for name in FIGURES]),
        retold=likeness(last, bench.retold(last, source())),
        timed=_errors(bench.timed(last, source()).summary, last.summary),
        real=tuple(real),
        simulated=tuple(simulated),
        capacity=capacity,
    )


def _spread_s(bench: Bench) -> float:
    """From the start to the last arrival, as the workload has it."""
    spread_s = last_arrival_s(bench.prepared.open_source())
    if spread_s <= 0:
        raise ValueError(
            "all requests arrive at once, so there is no load to set: choose a workload with "
            "arrival times, or leave --load away"
        )
    return spread_s


def _throughput(run: Run) -> float:
    throughput = run.summary["request_throughput"]
    if not throughput:
        raise ValueError("no request was completed: there is nothing to compare")
    return throughput


def _errors(found: Summary, real: Summary) -> dict[str, float]:
    return {name: one.error for name in FIGURES for one in [_compared(name, [real], [found])]}


def _compared(name: str, real: list[Summary], simulated: list[Summary]) -> Compared:
    ours, theirs = (tuple([one[name] for one in of]) for of in (real, simulated))
    values = [value for value in (*ours, *theirs) if value is not None]
    if len(values) < len(ours) + len(theirs) or min(values) <= 0:
        raise ValueError(f"{name} is undefined in a run: real {ours}, simulated {theirs}")
    return Compared(name=name, real=ours, simulated=theirs)  # type: ignore[arg-type]
