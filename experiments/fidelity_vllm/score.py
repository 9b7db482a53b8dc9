"""How far a simulated run is from the measured one, over some of the requests.

Owns: the figures and what each is allowed. In: two `Served`. Out: `Score`s. Must not know: where
either comes from.
"""

from typing import NamedTuple

import numpy as np

from experiments.fidelity_vllm.served import Served


class Score(NamedTuple):
    """One figure: measured, simulated, the relative error, and what is allowed of it."""

    figure: str
    measured: float
    simulated: float
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether it is no more than that."""
        return abs(self.error) <= self.allowed


def score(measured: Served, simulated: Served, requests: slice) -> list[Score]:
    """Of the requests in a slice of those in order of arrival.

    Running requests over time: the mean of the absolute differences at the ticks of the measured
    run, relative to the mean of the measured ones, from when the first of these requests got its
    first token until the last one got its last.
    """
    figures = {
        "mean TTFT, s": (lambda run: run.ttft_s[requests].mean(), 0.10),
        "mean TPOT, ms": (lambda run: 1e3 * run.tpot_s[requests].mean(), 0.10),
        "p90 TPOT, ms": (lambda run: 1e3 * np.percentile(run.tpot_s[requests], 90), 0.15),
        "output throughput, tokens/s": (lambda run: throughput(run, requests), 0.10),
    }
    scores = []
    for name, (figure, allowed) in figures.items():
        ours, theirs = float(figure(measured)), float(figure(simulated))
        scores.append(Score(name, ours, theirs, theirs / ours - 1, allowed))
    return [*scores, running_score(measured, simulated, requests)]


def throughput(run: Served, requests: slice) -> float:
    """Output tokens per second, from the first arrival to the last token."""
    span_s = run.lasts_s[requests].max() - run.arrivals_s[requests].min()
    return float(run.num_outputs[requests].sum() / span_s)


def running_score(measured: Served, simulated: Served, requests: slice) -> Score:
    """See `score`."""
    first_s, last_s = measured.firsts_s[requests].min(), measured.lasts_s[requests].max()
    is_in = (measured.ticks_s >= first_s) & (measured.ticks_s <= last_s)
    ours, theirs = measured.running[is_in], simulated.running_at(measured.ticks_s[is_in])
    error = float(np.abs(theirs - ours).mean() / ours.mean())
    return Score("running requests over time", ours.mean(), theirs.mean(), error, 0.10)


def distance(measured: Served, simulated: Served, requests: slice) -> float:
    """What a fit makes small: the root mean square of the differences between the deciles of TTFT,
    TPOT and e2e, each relative to its measured mean.
    """
    deciles = np.arange(10, 100, 10)
    parts = []
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        ours, theirs = (getattr(run, name)[requests] for run in (measured, simulated))
        parts.append((np.percentile(theirs, deciles) - np.percentile(ours, deciles)) / ours.mean())
    return float(np.sqrt(np.mean(np.square(parts))))
