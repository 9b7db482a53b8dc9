"""Sarathi-Serve's capacity: the rate at which the P99 gap between tokens still meets an SLO.

python -m experiments.sarathi_capacity.run [--processes 2] [--fast]
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.study.bars import grouped
from experiments.study.cells import Cells, each
from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, table
from paxserve.claims.knees import find_knee
from paxserve.report.style import Picture

MOST_QUEUE_MS = 2000.0  # median
_ORCA = ("batching=iteration", "reservation=on_demand", "placement=paged", "gate=[watermark]")
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "Orca": (*_ORCA, "limits.max_num_batched_tokens=16384"),
    "vLLM": ("baseline=vllm_v0", "limits.max_num_batched_tokens=16384"),
    "Sarathi, 512": ("baseline=sarathi", "limits.max_num_batched_tokens=512"),
    "Sarathi, 2048": ("baseline=sarathi", "limits.max_num_batched_tokens=2048"),
}


class Slo(NamedTuple):
    """A model, its experiment, and the bound on its P99 gap; `budget` is the paper's for it."""

    model: str
    experiment: str
    name: str
    gap_ms: float
    budget: str
    start: float


SLOS = (
    Slo("Mistral-7B", "sarathi_mistral", "strict", 100, "Sarathi, 512", 2.0),
    Slo("Mistral-7B", "sarathi_mistral", "relaxed", 500, "Sarathi, 2048", 3.0),
    Slo("Yi-34B, TP2", "sarathi_yi", "strict", 200, "Sarathi, 512", 0.7),
    Slo("Yi-34B, TP2", "sarathi_yi", "relaxed", 1000, "Sarathi, 2048", 1.0),
)


class Task(NamedTuple):
    """A capacity to be found."""

    slo: Slo
    system: str
    num_requests: int
    cells: Cells


def capacity(task: Task) -> float:
    """The highest rate in requests/s whose P99 gap and median queue time are within bounds."""

    def load(rate: float) -> float:
        """The worse of both, over its bound."""
        found = task.cells.run(
            [
                f"experiment={task.slo.experiment}",
                *SYSTEMS[task.system],
                f"workload.arrivals.rate={rate:.6g}",
                f"workload.num_requests={task.num_requests}",
            ]
        )
        gap_ms, queue_ms = found["p99_itl_ms"], found["median_queue_time_ms"]
        assert gap_ms is not None
        assert queue_ms is not None
        return max(gap_ms / task.slo.gap_ms, queue_ms / MOST_QUEUE_MS)

    return find_knee(load, start=task.slo.start, level_s=1.0, tolerance=0.08).rate


def study(setting: Setting) -> Findings:
    """Two models, two SLOs; `--fast`: the first of them, few requests."""
    slos = SLOS[:1] if setting.scale.fast else SLOS
    systems = ("vLLM", "Sarathi, 512") if setting.scale.fast else tuple(SYSTEMS)
    tasks = [
        Task(slo, system, setting.scale.of(512, 60), setting.cells)
        for slo in slos
        for system in systems
    ]
    found = each(capacity, tasks, num_processes=setting.num_processes, what="capacities")
    rates = {(task.slo, task.system): rate for task, rate in zip(tasks, found, strict=True)}
    tables = {"verdict": verdict(rates, slos), "capacities": rate_table(rates, slos)}
    return Findings(tables, {} if setting.scale.fast else {"capacity": _picture(rates, slos)})


type Rates = Mapping[tuple[Slo, str], float]


def verdict(rates: Rates, slos: Sequence[Slo]) -> str:
    """Sarathi above the others under the strict SLO, and less so under the relaxed one."""
    gains = {slo: rates[slo, slo.budget] / rates[slo, "vLLM"] for slo in slos}
    wrong = [f"{slo.model}, {slo.name}" for slo, gain in gains.items() if gain <= 1]
    trend = all(
        gains[strict] > gains[relaxed]
        for strict, relaxed in zip(slos[::2], slos[1::2], strict=False)
    )
    listed = ", ".join(f"{slo.model} {slo.name} {gain:.1f}" for slo, gain in gains.items())
    lines = [
        f"{mark(not wrong)}Sarathi at the paper's budget sustains more than vLLM"
        + (f", but not for {'; '.join(wrong)}" if wrong else "")
        + f": {listed} times."
    ]
    if len(slos) > 1:
        lines.append(
            f"{mark(trend)}The stricter the SLO, the more it gains "
            "(paper: up to 3.7 times vLLM for Yi-34B, 2.6 for Mistral-7B)."
        )
    return "\n".join(lines)


def rate_table(rates: Rates, slos: Sequence[Slo]) -> str:
    """Capacities in requests/s, and over vLLM's."""
    rows = []
    for slo in slos:
        for (own, system), rate in rates.items():
            if own == slo:
                over = rate / rates[slo, "vLLM"]
                marked = f"{system} (the paper's)" if system == slo.budget else system
                rows.append([slo.model, f"{slo.name}, {slo.gap_ms:.0f} ms", marked, rate, over])
    return table(["model", "P99 gap", "system", "requests/s", "over vLLM"], rows)


def _picture(rates: Rates, slos: Sequence[Slo]) -> Picture:
    groups = []
    for model in dict.fromkeys(slo.model for slo in slos):
        series: dict[str, dict[str, float]] = {}
        for (slo, system), rate in rates.items():
            if slo.model == model:
                series.setdefault(system, {})[f"{slo.name}, {slo.gap_ms:.0f} ms"] = rate
        groups.append((f"{model}, sharegpt4", series))
    return grouped(groups, unit="requests/s within the SLO")


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
