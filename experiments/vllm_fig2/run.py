"""vLLM's Figure 2: what KV memory is full of when more requests wait than fit.

python -m experiments.vllm_fig2.run [--fast]
"""

from experiments.study.bars import stacked
from experiments.study.door import Findings, Setting, main
from experiments.study.published import value
from experiments.study.readme import mark, table
from paxserve.claims.figure12 import SHAREGPT
from paxserve.claims.overload import HEAVIER, SYSTEMS, Use, uses_of
from paxserve.report import style

PAPER = {
    "Orca Max": "Orca (Max)",
    "Orca Pow2": "Orca (Pow2)",
    "Orca Oracle": "Orca (Oracle)",
    "paged": "vLLM",
}
PARTS = {
    "token states": style.SKY,
    "reservation": style.GREEN,
    "internal frag": style.ORANGE,
    "external frag & others": style.VERMILLION,
}
TOLERANCE = 6.0  # points


def study(setting: Setting) -> Findings:
    """Shares of the pool; once more with lengths as heavy as the paper's figures imply."""
    path = setting.scale.trace(SHAREGPT)
    numbers = {name: setting.scale.of(*system.num_requests) for name, system in SYSTEMS.items()}
    published = {name: _published(setting, paper) for name, paper in PAPER.items()}
    uses = uses_of(path, numbers, factor=1.0)
    tables = {"verdict": verdict(published, uses), "bars": bar_table(published, uses)}
    if not setting.scale.fast:
        fewer = {name: system.num_heavier for name, system in SYSTEMS.items()}
        tables["heavier"] = bar_table(published, uses_of(path, fewer, factor=HEAVIER))
    bars = {}
    for name in PAPER:
        theirs = published[name]
        bars[f"{name}, published"] = theirs if len(theirs) == len(PARTS) else [*theirs, 0, 0, 0]
        bars[f"{name}, measured"] = uses[name][: len(PARTS)]
    picture = stacked(bars, PARTS, heading="KV memory at overload, OPT-13B, ShareGPT", unit="%")
    return Findings(tables, {"figure2": picture})


def verdict(published: dict[str, list[float]], uses: dict[str, Use]) -> str:
    """Bars further away than the tolerance, and the order of token states."""
    far = [
        f"{part} of {name} ({ours - theirs:+.1f})"
        for name in PAPER
        for part, theirs, ours in zip(PARTS, published[name], uses[name], strict=False)
        if abs(ours - theirs) > TOLERANCE
    ]
    live = [use.live for use in uses.values()]
    order = "as published" if live == sorted(live) else "not as published"
    holds = not far and order == "as published"
    number = sum(map(len, published.values()))
    apart = f"; further: {', '.join(far)}" if far else ""
    return (
        f"{mark(holds)}{number - len(far)} of {number} printed shares are within {TOLERANCE:.0f} "
        f"points{apart}; the order of token states is {order}."
    )


def bar_table(published: dict[str, list[float]], uses: dict[str, Use]) -> str:
    """Shares in %, published and measured, and how many points apart."""
    rows = []
    for name in PAPER:
        theirs = [*published[name], None, None, None][: len(PARTS)]
        for part, stated, ours in zip(PARTS, theirs, uses[name], strict=False):
            apart = None if stated is None else f"{ours - stated:+.1f}"
            rows.append([name, part, stated, f"{ours:.1f}", apart])
    return table(["system", "part", "published, %", "measured, %", "apart, points"], rows)


def _published(setting: Setting, paper: str) -> list[float]:
    """The printed shares, of vLLM the token states only."""
    parts = list(PARTS)[: 1 if paper == "vLLM" else len(PARTS)]
    return [
        value(setting.data, paper="vLLM SOSP23", figure="2", panel=paper, series=part)
        for part in parts
    ]


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
