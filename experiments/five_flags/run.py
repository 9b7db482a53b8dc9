"""vLLM's five flags, and block_size: what each moves, and what the log shows of it.

python -m experiments.five_flags.run [--processes 2] [--fast]
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments.study.bars import grouped
from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, table
from paxserve.claims.flags import FLAGS, LOGGED, cell, figures_of, moved
from paxserve.report.style import Picture

SHOWN = {
    "output_throughput": "tokens/s",
    "mean_ttft_ms": "TTFT mean, ms",
    "p99_itl_ms": "ITL p99, ms",
    "mean_running_requests": "running",
    "num_preemptions": "preempted",
    "prefix_hit_rate": "hit rate",
    "computed_tokens": "computed tokens",
    "kv_share_live": "KV live",
    "kv_share_tail": "KV tail",
    "chunks per prompt": "chunks per prompt",
}
DRAWN = {"output_throughput": "tokens/s", "mean_ttft_ms": "TTFT mean", "p99_itl_ms": "ITL p99"}
DEFAULTS = ("0.9", "256", "2048", "on", "on", "16")


def study(setting: Setting) -> Findings:
    """Every setting of every flag; `--fast`: the first and the last of two flags, few requests."""
    flags = FLAGS[1:3] if setting.scale.fast else FLAGS
    num_requests = setting.scale.of(1500, 60)
    named = [
        (flag.name, setting_name, cell(overrides, num_requests=num_requests))
        for flag in flags
        for setting_name, overrides in flag.settings.items()
    ]
    measure = partial(setting.cells.kept, figures_of)
    figures = each(
        measure, [one for _, _, one in named], num_processes=setting.num_processes, what="runs"
    )
    found: dict[str, dict[str, Any]] = {flag.name: {} for flag in flags}
    for (flag_name, setting_name, _), one in zip(named, figures, strict=True):
        found[flag_name][setting_name] = one
    tables = {
        "verdict": verdict(found),
        "figures": figure_table(found),
        "log": log_table(found),
    }
    return Findings(tables, {} if setting.scale.fast else {"flags": draw(found)})


def verdict(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Flags that move their figure as they should."""
    lines = []
    for flag in FLAGS:
        if flag.name in found:
            does = moved(flag, list(found[flag.name].values()))
            way = "raises" if flag.sign > 0 else "lowers"
            lines.append(f"{mark(does)}`{flag.name}` {way} {flag.moves}.")
    return "\n".join(lines)


def figure_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A line per setting."""
    rows = [
        [flag, setting, *[_shown(name, one[name]) for name in SHOWN]]
        for flag, settings in found.items()
        for setting, one in settings.items()
    ]
    return table(["flag", "setting", *SHOWN.values()], rows)


def log_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Steps in which the head of the queue was held back, in % of all, by why; and how to tell."""
    rows = []
    for flag in FLAGS:
        for setting, one in found.get(flag.name, {}).items():
            shares = [f"{100 * one[f'held back for {r}'] / one['num_steps']:.1f}" for r in LOGGED]
            rows.append([flag.name, setting, *shares, flag.shows])
    header = [f"held back for {reason}, % of steps" for reason in LOGGED]
    return table(["flag", "setting", *header, "how to tell from the log"], rows)


def draw(found: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Three figures of each setting, as multiples of the default's."""
    groups = []
    for (flag, settings), default in zip(found.items(), DEFAULTS, strict=True):
        base = settings[default]
        series = {
            label: {setting: one[name] / base[name] for setting, one in settings.items()}
            for name, label in DRAWN.items()
        }
        groups.append((flag, series))
    return grouped(groups, unit="times the default's", columns=3, are_ratios=True)


def _shown(name: str, value: float) -> str | float:
    return f"{100 * value:.1f} %" if name in ("prefix_hit_rate", "kv_share_live", "kv_share_tail") \
        else value  # fmt: skip


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
