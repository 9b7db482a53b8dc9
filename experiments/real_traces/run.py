"""Azure's traces under three schedulers, and what Mooncake's find in a cache.

python -m experiments.real_traces.run [--processes 2] [--fast]
"""

from collections.abc import Mapping, Sequence

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, ratio, table
from paxserve.metrics import Summary
from paxserve.report import style
from paxserve.report.style import Picture, panels, title

AZURE = {
    "conversation": "azure2023/AzureLLMInferenceTrace_conv.csv",
    "code": "azure2023/AzureLLMInferenceTrace_code.csv",
}
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "vLLM V0": ("baseline=vllm_v0",),
    "Sarathi, 512": ("baseline=sarathi", "limits.max_num_batched_tokens=512"),
    "Sarathi, 2048": ("baseline=sarathi", "limits.max_num_batched_tokens=2048"),
    "vLLM V1": ("baseline=vllm_v1",),
}
SHOWN = {
    "median_ttft_ms": "TTFT median, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "p99_itl_ms": "ITL p99, ms",
    "mean_running_requests": "running",
    "busy_share": "share of time in steps",
}
MOONCAKE = {
    "conversation": "mooncake/conversation_trace.jsonl",
    "synthetic": "mooncake/synthetic_trace.jsonl",
}
# Blocks of 512 tokens that hit with a cache without end (counted from the files), in %; and the
# share of the most possible that a cache of 3 million tokens reaches (Mooncake, Figure 9).
WITHOUT_END = {"conversation": 36.6, "synthetic": 64.0}
OF_THE_MOST = {"conversation": 41.0, "synthetic": 46.0}
LOCAL = 3.0  # million tokens
SIZES = (0.5, 1.0, LOCAL, 10.0, 50.0, 100.0)  # million tokens
_BLOCK = 512


def azure_cell(setting: Setting, trace: str, system: Sequence[str]) -> list[str]:
    """A part of the trace at its own times."""
    return [
        "experiment=azure",
        *system,
        f"workload.path={setting.scale.trace(AZURE[trace])}",
        f"workload.limit={setting.scale.of(4000, 60)}",
    ]


def mooncake_cell(setting: Setting, trace: str, millions: float) -> list[str]:
    """All of the trace, with a cache of so many million tokens."""
    return [
        "experiment=mooncake",
        f"workload.path={setting.scale.trace(MOONCAKE[trace])}",
        f"workload.limit={setting.scale.of(0, 300)}",
        f"limits.num_blocks_override={1 + round(millions * 1e6 / _BLOCK)}",
    ]


def study(setting: Setting) -> Findings:
    """Two traces of each; `--fast`: the beginning of one, two schedulers, two sizes."""
    is_fast = setting.scale.fast
    systems = dict(list(SYSTEMS.items())[:2]) if is_fast else SYSTEMS
    sizes = (SIZES[0], SIZES[-1]) if is_fast else SIZES
    traces = ("conversation",) if is_fast else tuple(AZURE)
    stores = ("conversation",) if is_fast else tuple(MOONCAKE)
    served = {
        (trace, name): azure_cell(setting, trace, system)
        for trace in traces
        for name, system in systems.items()
    }
    stored = {
        (trace, size): mooncake_cell(setting, trace, size) for trace in stores for size in sizes
    }
    cells = [*served.values(), *stored.values()]
    found = each(setting.cells.run, cells, num_processes=setting.num_processes, what="runs")
    runs = dict(zip(served, found, strict=False))
    rates = {
        key: 100 * (run["prefix_hit_rate"] or 0.0)
        for key, run in zip(stored, found[len(served) :], strict=True)
    }
    tables = {"azure": azure_table(runs), "mooncake": hit_table(rates)}
    if not is_fast:
        tables["verdict"] = verdict(runs, rates)
    return Findings(tables, {} if is_fast else {"hits": draw(rates)})


type Runs = Mapping[tuple[str, str], Summary]
type Rates = Mapping[tuple[str, float], float]


def verdict(runs: Runs, rates: Rates) -> str:
    """Chunking and the longest gaps; hits of a cache without end, and of a local one."""
    gaps = [runs["conversation", name]["p99_itl_ms"] or 0.0 for name in ("vLLM V0", "Sarathi, 512")]
    shorter = gaps[0] / gaps[1]
    lines = [
        f"{mark(shorter > 1.5)}On Azure's conversations chunks of "
        f"512 tokens make the P99 gap {shorter:.1f} times shorter than whole prompts do."
    ]
    for trace in MOONCAKE:
        most = rates[trace, SIZES[-1]]
        local = 100 * rates[trace, LOCAL] / most
        near = abs(most - WITHOUT_END[trace]) < 3
        lines.append(
            f"{mark(near)}Mooncake, {trace}: {most:.1f} % of prompt tokens hit in the largest "
            f"cache ({WITHOUT_END[trace]} % of blocks without end)."
        )
        near = abs(local - OF_THE_MOST[trace]) < 15
        lines.append(
            f"{mark(near)}Mooncake, {trace}: 3 million tokens reach {local:.0f} % of that "
            f"({OF_THE_MOST[trace]:.0f} % in the paper; within 15 points)."
        )
    return "\n".join(lines)


def azure_table(runs: Runs) -> str:
    """A line per trace and scheduler."""
    rows = []
    for (trace, name), run in runs.items():
        rows.append([trace, name, *[run[key] for key in SHOWN]])
    return table(["trace", "scheduler", *SHOWN.values()], rows)


def hit_table(rates: Rates) -> str:
    """Hit rates by size, and as shares of the largest cache's."""
    rows = []
    for (trace, size), rate in rates.items():
        most = max(other for (own, _), other in rates.items() if own == trace)
        rows.append([trace, f"{size:g}", f"{rate:.1f}", ratio(rate, most)])
    return table(["trace", "cache, million tokens", "hit rate, %", "of the largest"], rows)


def draw(rates: Rates) -> Picture:
    """Hit rate against the size of the cache."""
    picture, (axis,) = panels([3.2], width=7.0)
    for trace, colour in zip(MOONCAKE, style.SERIES, strict=False):
        sizes = [size for own, size in rates if own == trace]
        axis.plot(sizes, [rates[trace, size] for size in sizes], marker="o", color=colour,
                  label=trace)  # fmt: skip
        axis.axhline(WITHOUT_END[trace], color=colour, linestyle="--", linewidth=1)
    axis.set_xscale("log")
    axis.set_xlabel("cache, million tokens")
    axis.set_ylabel("prompt tokens that hit, %")
    axis.set_ylim(0, 80)
    axis.legend(frameon=False, fontsize=9)
    title(axis, "Mooncake's traces; dashed: without end")
    return picture


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
