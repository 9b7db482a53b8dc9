"""B6 with Alpaca: how many requests run together at 30 requests per s, vLLM's Figure 13b.

Requests are so short that memory alone does not bound the paged server: how long a step takes
decides whether the queue ever fills it. The engine on the virtual clock, as in `figure12.py`.
Source: Kwon et al., SOSP'23, Figure 13.
"""

from collections.abc import Callable, Iterator, Sequence

from paxserve.claims import Claim, Row, Scale, within
from paxserve.claims.figure12 import (
    ALPACA,
    FITTED_HOST_S,
    PANELS,
    SHAREGPT,
    SYSTEMS,
    Panel,
    at_rate,
    overrides,
)
from paxserve.claims.simulation import simulate
from paxserve.metrics import Summary

RATE = 30.0
V0 = ("baseline=vllm_v0",)
PANEL = PANELS[3]
BATCH_SIZES = {"Orca Max": 7.0, "Orca Pow2": 43.24, "Orca Oracle": 72.75, "vLLM": 132.44}
_LENGTHS = {  # as configured in the experiments
    SHAREGPT: {"scale_input": 1.043, "scale_output": 1.063},
    ALPACA: {"mean_input_tokens": 19.31, "scale_output": 0.8909},
}

B6_ALPACA = Row(
    "B6 Alpaca",
    "Mean number of batched requests, OPT-13B, Alpaca at 30 requests/s",
    BATCH_SIZES,
    "20 %",
)


def batched(scale: Scale) -> Iterator[Claim]:
    """B6 of Alpaca, and what prompts in steps of their own do to the row that fails."""
    path, seconds = scale.trace(ALPACA), scale.of(300, 40)
    found = {
        name: num_running(PANEL, SYSTEMS[name], path=path, rate=RATE, seconds=seconds)
        for name in BATCH_SIZES
    }
    first = num_running(PANEL, V0, path=path, rate=RATE, seconds=seconds)
    yield B6_ALPACA.measured(
        {name: round(number, 2) for name, number in found.items()},
        holds=all(within(found[name], BATCH_SIZES[name], share=0.2) for name in found),
        note=f"{seconds} s of arrivals. The three Orcas are full, and near. vLLM is not full here: "
        "in this panel its knee is above the paper's (see the study of Figure 12), since nothing "
        "but 0.06 ms of the host grows with rows. As vLLM V0, whose prompts have steps of their "
        f"own, it is full: {first:.2f}",
    )


def num_running(
    panel: Panel,
    system: Sequence[str],
    *,
    path: str,
    rate: float,
    seconds: float,
    factor: float = 1.0,
    run: Callable[[Sequence[str]], Summary] = simulate,
) -> float:
    """Mean over time of how many run together.

    Args:
        panel, system, path, rate, seconds: as of `figure12.overrides` and `at_rate`.
        factor: on all lengths; 1.15 is what the paper's other figures imply (see B6).
        run: makes the summary of a cell.
    """
    host_s = FITTED_HOST_S[panel.model]
    cell = overrides(panel, system, path=path, host_s=host_s)
    cell += at_rate(rate, seconds=seconds)
    if factor != 1:
        cell += [f"workload.lengths.{k}={factor * v:.5g}" for k, v in _LENGTHS[panel.trace].items()]
    found = run(cell)["mean_running_requests"]
    assert found is not None
    return found
