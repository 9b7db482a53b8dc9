"""Fair sharing between two clients that ask for too much: FCFS, and VTC.

python -m experiments.vtc_fairness.run [--processes 2] [--fast]
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, ratio, table
from paxserve.claims.simulation import served
from paxserve.report import style
from paxserve.report.style import Picture, panels, title
from paxserve.request import Request

SYSTEMS = {"FCFS": ("baseline=vtc", "admission=fcfs"), "VTC": ("baseline=vtc",)}
# The artifact's runs: tokens/s in and out; mean first-token latency in s of the client that asks
# less, and of the one that asks more.
PUBLISHED = {"FCFS": (876, 485, 485), "VTC": (895, 215, 598)}
LIGHT, HEAVY = "client-1", "client-0"
W_INPUT, W_OUTPUT = 1.0, 2.0
POOL, PROMPT = 10_000, 256
_BIN_S = 20.0


def fairness(overrides: Sequence[str]) -> dict[str, Any]:
    """Per client: mean time to first token, and service over time while both wait."""
    done = served(overrides)
    requests = done.engine.requests
    both_until_s = min(
        max(r.first_scheduled_s or 0.0 for r in requests if r.origin.client == client)
        for client in (LIGHT, HEAVY)
    )
    edges = np.arange(0.0, both_until_s, _BIN_S)
    service = {
        client: _service([r for r in requests if r.origin.client == client], edges)
        for client in (LIGHT, HEAVY)
    }
    return {
        "ttft_s": {
            client: float(np.mean([r.sequence.token_times_s[0] - r.arrival_s for r in requests
                                   if r.origin.client == client]))
            for client in (LIGHT, HEAVY)
        },
        "tokens_per_s": done.summary["total_token_throughput"],
        "times_s": edges[1:].tolist(),
        "service": {client: values.tolist() for client, values in service.items()},
    }  # fmt: skip


def _service(requests: Sequence[Request], edges: np.ndarray) -> np.ndarray:
    """Weighted tokens by the end of each bin: the input when it enters, outputs as they come."""
    times = [r.first_scheduled_s for r in requests if r.first_scheduled_s is not None]
    weights = [W_INPUT * r.num_prompt_tokens for r in requests if r.first_scheduled_s is not None]
    outputs = [second for r in requests for second in r.sequence.token_times_s]
    entered = np.histogram(times, edges, weights=weights)[0]
    return np.cumsum(entered + W_OUTPUT * np.histogram(outputs, edges)[0])


def study(setting: Setting) -> Findings:
    """Two orders; `--fast`: few requests."""
    num_requests = setting.scale.of(2700, 300)
    cells = [
        ["experiment=vtc_overload", *system, f"workload.num_requests={num_requests}"]
        for system in SYSTEMS.values()
    ]
    measure = partial(setting.cells.kept, fairness)
    found = each(measure, cells, num_processes=setting.num_processes, what="runs")
    runs = dict(zip(SYSTEMS, found, strict=True))
    tables = {"verdict": verdict(runs), "clients": client_table(runs)}
    return Findings(tables, {"service": draw(runs)})


def bound() -> float:
    """Theorem 4.4: how far apart the service of two clients may be that both wait."""
    return 2 * max(W_INPUT * PROMPT, W_OUTPUT * POOL)


def largest_gap(run: Mapping[str, Any]) -> float:
    """Of service between the two, while both have requests waiting."""
    return float(np.max(np.abs(np.subtract(*[run["service"][c] for c in (LIGHT, HEAVY)]))))


def verdict(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The bound of VTC, that FCFS has none, and that nothing is lost."""
    gaps = {name: largest_gap(run) for name, run in runs.items()}
    light = {name: run["ttft_s"][LIGHT] for name, run in runs.items()}
    rate = runs["VTC"]["tokens_per_s"] / runs["FCFS"]["tokens_per_s"]
    is_bound = gaps["VTC"] <= bound()
    holds = is_bound and light["VTC"] < 0.8 * light["FCFS"] and rate > 0.95
    return (
        f"{mark(holds)}Under VTC the service of two clients that both wait is {gaps['VTC']:.0f} "
        f"weighted tokens apart at most (bound: {bound():.0f}; FCFS: {gaps['FCFS']:.0f}); the one "
        f"that asks less waits {light['VTC'] / light['FCFS']:.2f} times as long as under FCFS; "
        f"throughput is {rate:.3f} times that of FCFS."
    )


def client_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Published beside measured."""
    rows = []
    for name, run in runs.items():
        ours = (run["tokens_per_s"], run["ttft_s"][LIGHT], run["ttft_s"][HEAVY])
        figures = ("tokens/s, in and out", "TTFT of who asks less, s", "TTFT of who asks more, s")
        for figure, theirs, own in zip(figures, PUBLISHED[name], ours, strict=True):
            rows.append([name, figure, theirs, own, ratio(own, theirs)])
    return table(["order", "figure", "published", "measured", "ratio"], rows)


def draw(runs: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Difference of service over time."""
    picture, (axis,) = panels([3.2], width=8.0)
    for (name, run), colour in zip(runs.items(), style.SERIES, strict=False):
        gap = np.subtract(run["service"][HEAVY], run["service"][LIGHT])
        axis.plot(run["times_s"], gap / 1000, color=colour, label=name)
    axis.axhspan(-bound() / 1000, bound() / 1000, color=style.GRID, alpha=0.5, zorder=0)
    axis.set_xlabel("s")
    axis.set_ylabel("thousand weighted tokens")
    axis.legend(frameon=False, fontsize=9)
    title(axis, "Service of who asks twice as much, less that of the other; grey: the bound")
    return picture


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
