"""A long prompt among streams: in a step of its own, and in chunks of several sizes.

python -m experiments.prefill_stall.run [--fast]
"""

from collections.abc import Mapping

import numpy as np

from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, table
from paxserve.claims.stall import NUM_STREAMS, PROMPT, WHOLE, Stall, chunked, stall
from paxserve.report import style
from paxserve.report.style import Picture, panels, title

BUDGETS = (128, 256, 512, 1024, 2048)
PROMPTS = (500, 1000, 2000, 4000, 8000)
WHOLE_NAME = "whole, own step"


def study(setting: Setting) -> Findings:
    """Budgets for one prompt, then prompts for two systems; `--fast` leaves most of them out."""
    budgets = BUDGETS[2:3] if setting.scale.fast else BUDGETS
    prompts = PROMPTS[2:3] if setting.scale.fast else PROMPTS
    systems = {WHOLE_NAME: WHOLE} | {f"chunks, budget {each}": chunked(each) for each in budgets}
    stalls = {name: stall(system) for name, system in systems.items()}
    tables = {"verdict": verdict(stalls), "budgets": budget_table(stalls)}
    longer = {prompt: (stall(WHOLE, prompt=prompt), stall(chunked(512), prompt=prompt))
              for prompt in prompts}  # fmt: skip
    rows = [
        [prompt, *(1000 * each.longest_s for each in pair), *(1000 * each.ttft_s for each in pair)]
        for prompt, pair in longer.items()
    ]
    header = ["prompt, tokens", "longest gap, whole", "chunked", "TTFT, whole", "chunked"]
    tables["prompts"] = table(header, rows)
    return Findings(tables, {"gaps": draw(stalls)})


def verdict(stalls: Mapping[str, Stall]) -> str:
    """Whether the claim holds, in its own words."""
    whole, mixed = stalls[WHOLE_NAME], stalls["chunks, budget 512"]
    later_ms = 1000 * (mixed.ttft_s - whole.ttft_s)
    holds = whole.longest_s > 3 * mixed.longest_s and 10 <= later_ms <= 100
    return (
        f"{mark(holds)}A prompt of {PROMPT} tokens stops each of "
        f"{NUM_STREAMS} streams for {1000 * whole.longest_s:.0f} ms when it has a step of its own "
        f"({whole.longest_s / whole.ordinary_s:.1f} ordinary gaps), and for "
        f"{1000 * mixed.longest_s:.0f} ms at most in steps of 512 tokens; its first token then "
        f"comes {later_ms:.0f} ms later."
    )


def budget_table(stalls: Mapping[str, Stall]) -> str:
    """Gaps of the streams and TTFT of the newcomer, in ms."""
    rows = [
        [
            name,
            1000 * each.ordinary_s,
            1000 * each.longest_s,
            each.longest_s / each.ordinary_s,
            1000 * each.ttft_s,
        ]
        for name, each in stalls.items()
    ]
    header = ["prompt of 2,000 tokens", "ordinary gap, ms", "longest gap, ms", "in ordinary gaps"]
    return table([*header, "newcomer's TTFT, ms"], rows)


def draw(stalls: Mapping[str, Stall]) -> Picture:
    """One stream: each gap at the time when it ends."""
    picture, (axis,) = panels([3.4], width=8.5)
    colours = style.series_colours(len(stalls))
    for (name, each), colour in zip(stalls.items(), colours, strict=True):
        gaps = np.array([*each.gaps_s, *[each.ordinary_s] * 4])
        times = np.cumsum(gaps)
        axis.plot(1000 * times, 1000 * gaps, marker="o", markersize=3, lw=1.1, color=colour,
                  label=name)  # fmt: skip
    axis.set_xlabel("ms since the newcomer arrived")
    axis.set_ylabel("gap before this token, ms")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=9)
    title(axis, f"One of {NUM_STREAMS} streams while a prompt of {PROMPT} tokens comes in")
    return picture


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
