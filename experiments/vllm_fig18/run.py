"""vLLM's Figures 18b and 19b: block size; recompute or swap; and the watermark.

python -m experiments.vllm_fig18.run [--processes 2] [--fast]
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.published import curve
from experiments.study.readme import mark, table
from paxserve.claims.figure12 import (
    ALPACA,
    FITTED_HOST_S,
    LATENCY,
    PANELS,
    SHAREGPT,
    SYSTEMS,
    at_rate,
    overrides,
)
from paxserve.claims.knees import Point
from paxserve.report import style
from paxserve.report.style import Picture, panels, title

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WATERMARKS = (0.0, 0.01, 0.05, 0.1, 0.2)
RATES = {SHAREGPT: 1.8, ALPACA: 38.0}  # the paper does not say its own: just below our knees
NAMES = {SHAREGPT: "ShareGPT", ALPACA: "Alpaca"}
MODES = {"recompute": "Recompute", "swap": "Swap"}
_SWAP = "limits.swap_space_gib=20"  # the default of the authors' engine
_ROOM = "limits.kv_cache_memory_bytes=13100000000"  # for a null block of any size


def cell(setting: Setting, trace: str, settings: Sequence[str]) -> list[str]:
    """vLLM with OPT-13B just below its knee, and these settings."""
    panel = next(panel for panel in PANELS if panel.trace == trace)
    seconds = setting.scale.of({SHAREGPT: 1800, ALPACA: 200}[trace], 20)
    plain = overrides(
        panel,
        SYSTEMS["vLLM"],
        path=setting.scale.trace(trace),
        host_s=FITTED_HOST_S[panel.model],
    )
    return [*plain, *at_rate(RATES[trace], seconds=seconds), _ROOM, *settings]


def study(setting: Setting) -> Findings:
    """Every size, mode and watermark; `--fast`: three sizes, and two of the others."""
    is_fast = setting.scale.fast
    sizes = (1, 16, 256) if is_fast else SIZES
    watermarks = (0.0, 0.2) if is_fast else WATERMARKS
    settings = {
        (trace, mode, size): [f"limits.block_size={size}", *_mode(mode)]
        for trace in (SHAREGPT, ALPACA)
        for mode in (MODES if trace == SHAREGPT else ("recompute",))
        for size in sizes
    } | {
        (SHAREGPT, "watermark", share): [f"gate.watermark.share={share}", *_mode("recompute")]
        for share in watermarks
    }
    cells = [cell(setting, trace, own) for (trace, _, _), own in settings.items()]
    found = each(setting.cells.run, cells, num_processes=setting.num_processes, what="runs")
    runs: Runs = dict(zip(settings, found, strict=True))
    published = {
        ("18b", NAMES[trace]): _curve(setting, "18b", NAMES[trace]) for trace in (SHAREGPT, ALPACA)
    } | {("19b", mode): _curve(setting, "19b", series) for mode, series in MODES.items()}
    tables = {
        "verdict": verdict(runs, sizes),
        "sizes": size_table(runs, published, sizes),
        "watermarks": watermark_table(runs, watermarks),
    }
    return Findings(tables, {} if is_fast else {"figure18": draw(runs, published)})


type Runs = Mapping[tuple[str, str, float], Mapping[str, Any]]
type Published = Mapping[tuple[str, str], Mapping[float, float]]


def verdict(runs: Runs, sizes: Sequence[int]) -> str:
    """Large blocks cost, small ones do not here; recompute and swap are alike."""
    lines = []
    for trace in (SHAREGPT, ALPACA):
        latency = {size: runs[trace, "recompute", size][LATENCY] for size in sizes}
        large = latency[sizes[-1]] / latency[16]
        small = latency[sizes[0]] / latency[16]
        lines.append(
            f"{mark(large > 1.2)}{NAMES[trace]}: blocks of {sizes[-1]} take {large:.1f} times the "
            f"latency of blocks of 16, since fewer requests fit."
        )
        lines.append(
            f"- **Not reproduced.** {NAMES[trace]}: blocks of {sizes[0]} take {small:.2f} times "
            "that of 16; in the paper many times, since its kernel reads small blocks slowly."
        )
    return "\n".join(lines)


def size_table(runs: Runs, published: Published, sizes: Sequence[int]) -> str:
    """Normalized latency in s per token, by block size; and what grows with it."""
    rows = []
    for size in sizes:
        both = [runs[SHAREGPT, mode, size] for mode in MODES]
        alpaca = runs[ALPACA, "recompute", size]
        rows.append(
            [
                size,
                published["18b", "ShareGPT"].get(size),
                both[0][LATENCY],
                both[0]["mean_running_requests"],
                f"{100 * both[0]['kv_share_tail']:.1f}",
                published["19b", "swap"].get(size),
                both[1][LATENCY],
                published["18b", "Alpaca"].get(size),
                alpaca[LATENCY],
                alpaca["mean_running_requests"],
            ]
        )
    header = ["block size", "ShareGPT, published", "measured", "running", "tails, % of KV"]
    header += ["swap, published", "measured", "Alpaca, published", "measured", "running"]
    return table(header, rows)


def watermark_table(runs: Runs, watermarks: Sequence[float]) -> str:
    """What keeping blocks free at admission does, ShareGPT."""
    rows = []
    for share in watermarks:
        run = runs[SHAREGPT, "watermark", share]
        again = 100 * run["recomputed_share_of_computed_tokens"]
        rows.append(
            [
                f"{100 * share:.0f} %",
                run[LATENCY],
                run["num_preemptions"],
                f"{again:.1f}",
                run["mean_running_requests"],
                run["median_queue_time_ms"],
            ]
        )
    header = ["watermark", "s/token", "preemptions", "tokens computed again, %", "running"]
    return table([*header, "queue time, median, ms"], rows)


def draw(runs: Runs, published: Published) -> Picture:
    """Latency against block size: two data sets, and two ways to preempt."""
    picture, axes = panels([3.2], columns=2, width=10.5)
    shown = (
        (axes[0], "Block size", [(NAMES[t], (t, "recompute"), ("18b", NAMES[t])) for t in NAMES]),
        (axes[1], "Recompute or swap, ShareGPT", [(m, (SHAREGPT, m), ("19b", m)) for m in MODES]),
    )
    for axis, heading, series in shown:
        for (name, own, paper), colour in zip(series, style.SERIES, strict=False):
            measured = [Point(size, run[LATENCY]) for (trace, mode, size), run in runs.items()
                        if (trace, mode) == own]  # fmt: skip
            theirs = [Point(*pair) for pair in published[paper].items()]
            for points, line, face in ((measured, "-", colour), (theirs, "--", "white")):
                axis.plot(
                    [point.rate for point in points],
                    [point.latency_s for point in points],
                    line,
                    marker="o",
                    markersize=4,
                    color=colour,
                    markerfacecolor=face,
                    label=name if line == "-" else f"{name}, published",
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.set_xlabel("tokens per block")
        axis.set_ylabel("s per output token")
        axis.legend(frameon=False, fontsize=8.5)
        title(axis, heading)
    return picture


def _mode(name: str) -> tuple[str, ...]:
    return (f"preemption={name}", _SWAP) if name == "swap" else (f"preemption={name}",)


def _curve(setting: Setting, figure: str, series: str) -> dict[float, float]:
    found = curve(setting.data, paper="vLLM SOSP23", figure=figure, panel="", series=series)
    return {point.rate: point.latency_s for point in found}


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
