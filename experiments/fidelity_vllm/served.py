"""What is known of a run: when each request arrived, got its first and its last token, and how many
ran at which time.

Owns: the files of LLMServingSim's measured runs, and their two clocks. In: a folder of them, or an
engine that has served. Out: `Served`. Must not know: scores.

Arrivals are on the wall clock, everything else on a monotonic one. Nobody is queued before they
arrive, so the offset is the least by which `queued_ts` is above `arrival_time`. The ticks of
`timeseries.csv` count from a moment of their own: the one at which running and waiting requests are
those that have been queued and have not had their last token.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paxserve.engine import Engine

SHIFTS_S = np.arange(0.0, 2.0, 0.01)  # of the ticks, among which the best is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Requests in order of arrival; seconds from the first. `running[i]` ran at `ticks_s[i]`."""

    arrivals_s: np.ndarray
    firsts_s: np.ndarray
    lasts_s: np.ndarray
    num_outputs: np.ndarray
    ticks_s: np.ndarray
    running: np.ndarray

    @property
    def ttft_s(self) -> np.ndarray:
        """Of each request."""
        return self.firsts_s - self.arrivals_s

    @property
    def tpot_s(self) -> np.ndarray:
        """Of each request; all have several tokens."""
        return (self.lasts_s - self.firsts_s) / (self.num_outputs - 1)

    @property
    def e2e_s(self) -> np.ndarray:
        """Of each request."""
        return self.lasts_s - self.arrivals_s

    def running_at(self, times_s: np.ndarray) -> np.ndarray:
        """How many ran at these times: as at the last tick before each."""
        places = np.searchsorted(self.ticks_s, times_s, side="right") - 1
        return np.where(places < 0, 0, self.running[np.maximum(places, 0)])


def read_measured(folder: Path) -> Served:
    """A folder of requests.jsonl and timeseries.csv."""
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    requests = [json.loads(line) for line in lines]
    arrivals, queued, firsts, lasts = (
        np.array([request[name] for request in requests])
        for name in ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    )
    start = arrivals[0] + (queued - arrivals).min()
    with (folder / "timeseries.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ticks, running, waiting = (
        np.array([float(row[name]) for row in rows]) for name in ("t", "running", "waiting")
    )
    shift = _shift(ticks, running + waiting, queued - start, lasts - start)
    return Served(
        arrivals_s=arrivals - arrivals[0],
        firsts_s=firsts - start,
        lasts_s=lasts - start,
        num_outputs=np.array([request["output_toks"] for request in requests]),
        ticks_s=ticks - shift,
        running=running,
    )


def of_engine(engine: Engine) -> Served:
    """What a simulated engine has served; one sequence per request."""
    requests = engine.requests
    first_s = requests[0].arrival_s
    times = [request.sequence.token_times_s for request in requests]
    return Served(
        arrivals_s=np.array([request.arrival_s for request in requests]) - first_s,
        firsts_s=np.array([own[0] for own in times]) - first_s,
        lasts_s=np.array([own[-1] for own in times]) - first_s,
        num_outputs=np.array([len(own) for own in times]),
        ticks_s=np.array([step.start_s for step in engine.steps]) - first_s,
        running=np.array([step.num_running for step in engine.steps]),
    )


def _shift(
    ticks: np.ndarray, present: np.ndarray, queued_s: np.ndarray, lasts_s: np.ndarray
) -> float:
    """By how much the ticks are late: the middle of the shifts that agree best."""

    def error(shift: float) -> float:
        times_s = ticks - shift
        come = np.searchsorted(np.sort(queued_s), times_s, side="right")
        gone = np.searchsorted(np.sort(lasts_s), times_s, side="right")
        return float(np.abs(come - gone - present).sum())

    errors = np.array([error(shift) for shift in SHIFTS_S])
    return float(np.median(SHIFTS_S[errors == errors.min()]))
