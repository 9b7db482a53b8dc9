"""A6: iteration-level against request-level batching, Orca's Figure 10 with 175B.

Prompts of 32 to 512 tokens, 1 to 128 generated, Poisson; the measure is the median of end-to-end
latency over generated tokens, read at twice its value without load. Request-level batching is
FasterTransformer at its two best settings, batches of 1 and of 8; as there, answers leave when
their batch does. One number is fitted, what the host takes per step, on the latency without load.
Source: Yu et al., "Orca", OSDI'22, section 6.2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from paxserve.claims import Claim, Row, Scale
from paxserve.claims.knees import Knee, find_knee
from paxserve.claims.simulation import served
from paxserve.events import Kind

IDLE_RATE, IDLE_S, LEVEL_S = 0.01, 0.095, 0.19
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    # Memory is promised by the true length; how it is laid out does not matter where it suffices.
    "Orca, 128": ("baseline=orca_oracle", "placement=paged", "limits.block_size=16"),
    "request level, 1": ("baseline=static", "limits.block_size=16", "limits.max_num_seqs=1"),
    "request level, 8": ("baseline=static", "limits.block_size=16", "limits.max_num_seqs=8"),
}
PUBLISHED = {"Orca, 128": 6.81, "request level": 0.185}
FITTED_HOST_S = 0.0514

A6 = Row(
    "A6",
    "Orca against request-level batching at a median of 190 ms per token, 175B",
    {"requests/s, Orca / request level": [6.81, 0.185], "times": 36.9},
    "within 2 x",
)


def median_latency_s(overrides: Sequence[str]) -> float:
    """Of all requests: from arrival to when the row is let go, over tokens generated."""
    engine = served(overrides).engine
    released = {e.request_id: e.time_s for e in engine.events if e.kind is Kind.RELEASED}
    return median(
        (released[request.request_id] - request.arrival_s) / request.num_output_tokens
        for request in engine.requests
    )


def cell(system: Sequence[str], *, rate: float, num_requests: int, host_s: float) -> list[str]:
    """The overrides of one run."""
    return [
        "experiment=orca_fig10",
        *system,
        f"workload.arrivals.rate={rate:.6g}",
        f"workload.num_requests={num_requests}",
        f"cost_model.host_s_per_step={host_s:.5f}",
    ]


type Measure = Callable[[Sequence[str]], float]


def fitted_host_s(*, measure: Measure = median_latency_s) -> float:
    """So that Orca without load takes what it takes in the paper, to 0.1 ms."""
    low, high = 0.0, IDLE_S
    while high - low > 1e-4:
        host_s = (low + high) / 2
        found = measure(cell(SYSTEMS["Orca, 128"], rate=IDLE_RATE, num_requests=50, host_s=host_s))
        low, high = (host_s, high) if found < IDLE_S else (low, host_s)
    return (low + high) / 2


def knee_of(
    system: str, *, num_requests: int, host_s: float, measure: Measure = median_latency_s
) -> Knee:
    """The rate at which the median passes 190 ms per token."""
    start = PUBLISHED.get(system, PUBLISHED["request level"])
    return find_knee(
        lambda rate: measure(
            cell(SYSTEMS[system], rate=rate, num_requests=num_requests, host_s=host_s)
        ),
        start=start,
        level_s=LEVEL_S,
        tolerance=0.1,
    )


def request_level(scale: Scale) -> Iterator[Claim]:
    """A6: the better of the two batch sizes against Orca."""
    host_s = FITTED_HOST_S if scale.fast else fitted_host_s()
    num_requests = scale.of(800, 200)
    rates = {name: knee_of(name, num_requests=num_requests, host_s=host_s).rate for name in SYSTEMS}
    best = max(rate for name, rate in rates.items() if name.startswith("request"))
    times = rates["Orca, 128"] / best
    yield A6.measured(
        {
            "requests/s, Orca / request level": [round(rates["Orca, 128"], 2), round(best, 3)],
            "times": round(times, 1),
        },
        holds=36.9 / 2 <= times <= 36.9 * 2,
        note=f"{num_requests} requests; request level is the better of batches of 1 "
        f"({rates['request level, 1']:.3f}) and 8 ({rates['request level, 8']:.3f}); the host "
        f"takes {1000 * host_s:.1f} ms per step, fitted to 95 ms per token without load",
    )
