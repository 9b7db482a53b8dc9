"""The three factors that bring a simulated run nearest to a measured one.

Owns: the cards' settings, and the search. In: a measured run. Out: `Factors`. Must not know: what
is reported of them.

A fit sees the measured times of requests 0 to 149 only. All 300 are simulated: the later ones are
there while the earlier ones run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from experiments.fidelity_vllm.score import distance
from experiments.fidelity_vllm.served import Served, of_engine
from paxserve import experiment
from paxserve.hydra_config import compose_config

FITTED, SCORED = slice(0, 150), slice(150, 300)
TOLERANCE = 5e-3  # of the factors' logarithms, and of the distance
RECORDED_LINKS = (
    "hardware.link_bytes_per_s=16.0e9",
    "hardware.all_reduce_latency_s=40.0e-6",  # two exchanges of 20 us
    "cost_model.link_efficiency=1.0",
)  # of the two RTX PRO 6000, by the config.json beside the run; the data sheet has 64 GB/s


class Factors(NamedTuple):
    """Shares of the data sheet's rates that are reached, and what the host takes per step."""

    compute_efficiency: float
    bandwidth_efficiency: float
    host_s_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One measured run: its folder, and what it was run with, by its meta.json."""

    name: str
    folder: str
    overrides: tuple[str, ...]
    start: Factors


CARDS = (
    Card(
        name="RTX 4090, Llama-3.1-8B",
        folder="RTX4090_Llama-3.1-8B",
        overrides=(
            "model=llama-3.1-8b",
            "hardware=rtx4090",
            "limits.max_model_len=32768",
            "limits.memory_utilization=0.95",  # room for the blocks that vLLM had, on paper
            "limits.num_blocks_override=2588",
        ),
        start=Factors(0.8, 0.8, 2e-3),
    ),
    Card(
        name="2 x RTX PRO 6000, Qwen3-32B",
        folder="RTXPRO6000_Qwen3-32B",
        overrides=(
            "model=qwen3-32b",
            "hardware=rtxpro6000",
            "limits.tensor_parallel_size=2",
            "limits.max_num_seqs=128",
        ),
        start=Factors(0.4, 0.5, 4e-3),
    ),
)


def simulate(card: Card, factors: Factors, data: Path, *more: str) -> Served:
    """Serve the card's requests; `more` are overrides."""
    config, choices, explicit = compose_config(
        [
            *("baseline=vllm_v1", "executor=simulated", "cost_model=roofline"),
            *("workload=llmservingsim", f"workload.path={folder_of(card, data)}/requests.jsonl"),
            *card.overrides,
            *[f"cost_model.{name}={value!r}" for name, value in factors._asdict().items()],
            *more,
        ]
    )
    done = experiment.run(
        config,
        choices=choices,
        explicit=explicit,
        say=lambda message: None,
        progress=lambda what, done, total: None,
    )
    return of_engine(done.engine)


def folder_of(card: Card, data: Path) -> Path:
    """Where the measured run lies in the reference data."""
    return data / "traces" / "llmservingsim" / "vllm_measured" / card.folder


def fit(
    card: Card, measured: Served, data: Path, *, report: Callable[[Factors, float], None]
) -> Factors:
    """Nelder and Mead's search on the logarithms of the factors; it needs no derivatives, which a
    schedule does not have.

    Args:
        card, data: which run, and where.
        measured: of which it looks at `FITTED`.
        report: told of every trial and its distance.
    """

    def of(logarithms: np.ndarray) -> float:
        factors = Factors(*np.exp(logarithms).tolist())
        if max(factors[:2]) > MOST_EFFICIENCY:
            return float("inf")
        found = distance(measured, simulate(card, factors, data), FITTED)
        report(factors, found)
        return found

    start = np.log(card.start)
    corners = np.vstack([start, start + np.diag([0.2, 0.2, 0.7])])
    options = {"initial_simplex": corners, "xatol": TOLERANCE, "fatol": TOLERANCE, "maxfev": 120}
    found = minimize(of, start, method="Nelder-Mead", options=options)
    return Factors(*np.exp(found.x).tolist())


MOST_EFFICIENCY = 1.0  # no kernel is faster than its data sheet
