"""B8: the rate that each system sustains, vLLM's Figure 12.

The engine on the virtual clock, with the roofline of `configs/experiment/sosp23*.yaml`. One number
per model is fitted, what the host takes per step: so that vLLM at the lowest rate that the paper
plots has the latency it plots there. Knees are read at 0.2 s per token.

"vLLM" here is `baseline=vllm_v0` with prompts joining the decodes of a step (`batching=iteration`):
so did the authors' engine of spring 2023 (cacheflow/core/scheduler.py of vllm-project/vllm), as did
their Orca; prompts came to have steps of their own only later. Source: Kwon et al., SOSP'23, 6.2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paxserve.claims import Claim, Row, Scale, within
from paxserve.claims.knees import Knee, Point, find_knee
from paxserve.claims.simulation import simulate
from paxserve.metrics import Summary

type Run = Callable[[Sequence[str]], Summary]

LATENCY = "mean_normalized_latency_s_per_token"
SHAREGPT = "nanoflow/sharegpt.csv"
ALPACA = "alpaca_lengths/alpaca_20k_output_lengths.csv"
_MOST_HOST_S = 0.2
_LEAST_REQUESTS = 60
_NO_BUDGET = "limits.max_num_batched_tokens=65536"  # Orca and FasterTransformer have none

SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "vLLM": ("baseline=vllm_v0", "batching=iteration"),
    "Orca Oracle": ("baseline=orca_oracle", _NO_BUDGET),
    "Orca Pow2": ("baseline=orca_pow2", _NO_BUDGET),
    "Orca Max": ("baseline=orca_max", _NO_BUDGET),
    # Blocks of 16 hold as many requests of 2,048 tokens as slots do, and are quicker to give back.
    "static": ("baseline=static", "limits.block_size=16", _NO_BUDGET),
}


class Panel(NamedTuple):
    """One of the six: a model and a data set.

    floor: the lowest rate that the paper plots of vLLM with this model and ShareGPT, and its
    latency there. knees: published, by system.
    """

    letter: str
    model: str
    trace: str
    floor: Point
    knees: Mapping[str, float]

    @property
    def title(self) -> str:
        """As people say it."""
        return f"{self.model}, {'ShareGPT' if self.trace == SHAREGPT else 'Alpaca'}"

    @property
    def is_compared_exactly(self) -> bool:
        """Whether the claim is about its ratios: the panels of ShareGPT."""
        return self.trace == SHAREGPT


def _knees(*rates: float) -> Mapping[str, float]:
    return dict(zip(SYSTEMS, rates, strict=True))


_FLOORS = {
    "OPT-13B": Point(1.0, 0.042),
    "OPT-66B": Point(0.4, 0.061),
    "OPT-175B": Point(1.5, 0.116),
}
PANELS = tuple(
    Panel(letter, model, trace, _FLOORS[model], knees)
    for letter, model, trace, knees in (
        ("a", "OPT-13B", SHAREGPT, _knees(1.86, 1.00, 0.75, 0.51, 0.13)),
        ("b", "OPT-66B", SHAREGPT, _knees(0.89, 0.33, 0.24, 0.17, 0.06)),
        ("c", "OPT-175B", SHAREGPT, _knees(2.13, 1.29, 1.09, 0.79, 0.05)),
        ("d", "OPT-13B", ALPACA, _knees(27.9, 21.0, 16.0, 3.3, 1.1)),
        ("e", "OPT-66B", ALPACA, _knees(18.4, 10.1, 6.1, 1.05, 0.6)),
        ("f", "OPT-175B", ALPACA, _knees(17.95, 17.9, 16.0, 4.75, 0.3)),
    )
)


def overrides(panel: Panel, system: Sequence[str], *, path: str, host_s: float) -> list[str]:
    """A system in a panel, but for the rate."""
    return [
        f"experiment=sosp23_fig12{panel.letter}",
        *system,
        f"workload.lengths.path={path}",
        f"cost_model.host_s_per_step={host_s:.5f}",
    ]


def at_rate(rate: float, *, seconds: float) -> list[str]:
    """So many seconds of arrivals at a rate in requests/s, but 60 requests at least."""
    num_requests = max(_LEAST_REQUESTS, round(rate * seconds))
    return [f"workload.arrivals.rate={rate:.6g}", f"workload.num_requests={num_requests}"]


def knee_of(
    panel: Panel,
    system: Sequence[str],
    *,
    path: str,
    start: float,
    seconds: float,
    host_s: float,
    run: Run = simulate,
    tolerance: float = 0.05,
) -> Knee:
    """Where the system's latency passes the level in this panel."""

    def latency_s(rate: float) -> float:
        cell = overrides(panel, system, path=path, host_s=host_s)
        return _latency(run([*cell, *at_rate(rate, seconds=seconds)]))

    return find_knee(latency_s, start=start, tolerance=tolerance)


def fitted_host_s(
    panel: Panel, system: Sequence[str], *, path: str, seconds: float, run: Run = simulate
) -> float:
    """What the host must take per step for the floor of the panel's model, to 0.1 ms; 0 if the
    device alone takes longer. `panel` is one of ShareGPT.
    """

    def latency_s(host_s: float) -> float:
        cell = overrides(panel, system, path=path, host_s=host_s)
        return _latency(run([*cell, *at_rate(panel.floor.rate, seconds=seconds)]))

    low, high, target = 0.0, _MOST_HOST_S, panel.floor.latency_s
    at_low = latency_s(low)
    guess = max(target - at_low, 0.0)  # a step makes one token of each row
    while high - low > 1e-4 and guess > 0:
        found = latency_s(guess)
        if abs(found - target) < 0.005 * target:
            return guess
        low, high = (guess, high) if found < target else (low, guess)
        step = guess + (target - found)
        guess = step if low < step < high else (low + high) / 2
    return guess


def _latency(summary: Summary) -> float:
    latency_s = summary[LATENCY]
    assert latency_s is not None
    return latency_s


B8 = Row(
    "B8",
    "Throughput of 2-4 times at comparable latency: knees of vLLM over those of Orca at 0.2 s per "
    "token, ShareGPT, OPT-13B / 66B / 175B",
    {"over Orca Oracle": [1.86, 2.72, 1.65], "over Orca Max": [3.67, 5.3, 2.71]},
    "25 % on ratios",
)


def sustained(scale: Scale) -> Iterator[Claim]:
    """B8: a knee per system, and one number fitted per model; briefly, without the fits."""
    path = scale.trace(SHAREGPT)
    seconds = scale.of(900, 150)
    ratios: dict[str, list[float]] = {name: [] for name in B8.stated}
    fitted = []
    for panel in PANELS[:3]:
        host_s = FITTED_HOST_S[panel.model]
        if not scale.fast:
            host_s = fitted_host_s(panel, SYSTEMS["vLLM"], path=path, seconds=seconds)
        fitted.append(round(1000 * host_s, 1))
        knees = {
            name: knee_of(
                panel,
                SYSTEMS[name],
                path=path,
                start=panel.knees[name],
                seconds=seconds,
                host_s=host_s,
                tolerance=scale.of(10, 35) / 100,
            ).rate
            for name in ("vLLM", "Orca Oracle", "Orca Max")
        }
        for name in ratios:
            ratios[name].append(round(knees["vLLM"] / knees[name.removeprefix("over ")], 2))
    is_near = [
        within(ours, theirs, share=0.25)
        for name, stated in B8.stated.items()
        if isinstance(stated, Sequence) and not isinstance(stated, str)
        for ours, theirs in zip(ratios[name], stated, strict=True)
    ]
    yield B8.measured(
        ratios,
        holds=all(is_near),
        note=f"{seconds} s of arrivals (the paper: an hour, 15 minutes for 175B); the host takes "
        f"{fitted} ms per step, {'as fitted before' if scale.fast else 'fitted'} on vLLM's floor",
    )


FITTED_HOST_S = {"OPT-13B": 0.0103, "OPT-66B": 0.0201, "OPT-175B": 0.0496}
