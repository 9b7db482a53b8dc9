"""vLLM's Figures 14a-c and 15a: parallel sampling, the rate sustained and the memory shared.

python -m experiments.vllm_fig14.run [--processes 2] [--fast]
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.published import curve
from experiments.study.rates import Curve, Panel, draw, measured
from experiments.study.readme import mark, ratio, table
from paxserve.claims.figure12 import ALPACA, FITTED_HOST_S, PANELS, SYSTEMS, at_rate, overrides
from paxserve.claims.knees import Knee, Point, crossing
from paxserve.claims.sharing import savings
from paxserve.claims.simulation import served
from paxserve.report.style import Picture

PAPER = {"vLLM": "vLLM", "Orca Oracle": "Oracle", "Orca Pow2": "Pow2", "Orca Max": "Max"}
# Orca without knowledge of lengths is measured with two samples only: minutes per point.
SYSTEMS_OF = {2: tuple(PAPER), 4: ("vLLM", "Orca Oracle"), 6: ("vLLM", "Orca Oracle")}
LETTERS = {2: "a parallel=2", 4: "b parallel=4", 6: "c parallel=6"}
SAVED = {2: 6.09, 4: 8.53, 6: 9.79}
LEVEL_S = 1.0  # the paper's axis ends there
_ALPACA = PANELS[3]
_BLOCK_SIZE = 16


def system(name: str, n: int, *, path: str) -> tuple[str, ...]:
    """Overrides of a system whose requests draw n samples each."""
    plain = overrides(_ALPACA, SYSTEMS[name], path=path, host_s=FITTED_HOST_S[_ALPACA.model])
    # A buddy's runs are the same in blocks of 16 as in slots, beyond 8 tokens; and counted sooner.
    blocks = () if name == "vLLM" else (f"limits.block_size={_BLOCK_SIZE}",)
    return (*plain, "sampling=random", "sampling.temperature=1.0", f"sampling.n={n}", *blocks)


def saved_share(cell: Sequence[str]) -> float:
    """Blocks saved by sharing over blocks that would be held without it, over time, in %."""
    return 100 * savings(served(cell).engine.steps, block_size=_BLOCK_SIZE)


def study(setting: Setting) -> Findings:
    """Three numbers of samples; `--fast`: two samples, two systems, few requests."""
    scale = setting.scale
    path = scale.trace(ALPACA)
    numbers = (2,) if scale.fast else tuple(LETTERS)
    names = {n: ("vLLM", "Orca Pow2") if scale.fast else SYSTEMS_OF[n] for n in numbers}
    published = {
        (n, name): curve(
            setting.data, paper="vLLM SOSP23", figure="14", panel=LETTERS[n], series=PAPER[name]
        )
        for n in numbers
        for name in names[n]
    }
    stated = {key: crossing(points, 0.999 * LEVEL_S) for key, points in published.items()}
    curves = [
        Curve(
            system(name, n, path=path),
            start=stated[n, name] or published[n, name][-1].rate,
            seconds=scale.of(300, 10),
            cells=setting.cells,
            level_s=LEVEL_S,
            tolerance=scale.of(8, 50) / 100,
            shares=() if scale.fast else (0.3, 0.7),
        )
        for n, name in published
    ]
    found = each(measured, curves, num_processes=setting.num_processes, what="knees")
    knees = dict(zip(published, found, strict=True))
    shares = each(
        partial(setting.cells.kept, saved_share),
        [[*system("vLLM", n, path=path), *at_rate(3 * 18.25 / n, seconds=scale.of(60, 2))]
         for n in numbers],
        num_processes=setting.num_processes,
        what="sharing",
    )  # fmt: skip
    tables = {
        "verdict": verdict(knees, stated),
        "knees": knee_table(knees, stated),
        "saved": table(
            ["samples", "saved, published, %", "measured, %", "apart, points"],
            [[n, SAVED[n], f"{share:.1f}", f"{share - SAVED[n]:+.1f}"]
             for n, share in zip(numbers, shares, strict=True)],
        ),
    }  # fmt: skip
    return Findings(tables, {"figure14": _picture(knees, published)})


type Key = tuple[int, str]


def verdict(knees: Mapping[Key, Knee], stated: Mapping[Key, float | None]) -> str:
    """The order of systems, and whether what vLLM gains over Oracle grows as published."""
    numbers = dict.fromkeys(n for n, _ in knees)
    wrong = [
        f"{first} under {second} with {n} samples"
        for n in numbers
        for first, second in combinations([name for own, name in knees if own == n], 2)
        if knees[n, first].rate <= knees[n, second].rate
    ]
    lines = [
        f"{mark(not wrong)}The order of the systems is as published"
        + (f", but for {'; '.join(wrong)}." if wrong else ", whatever the number of samples.")
    ]
    pairs = [(key, known) for key, known in stated.items() if known is not None]
    far = [f"{name} with {n}" for (n, name), known in pairs
           if abs(knees[n, name].rate - known) > 0.25 * known]  # fmt: skip
    near = f"{len(pairs) - len(far)} of {len(pairs)} rates at 1 s/token are within 25 %"
    apart = f"; not {', '.join(far)}" if far else ""
    lines.append(f"{mark(not far)}{near}{apart}.")
    return "\n".join(lines)


def knee_table(knees: Mapping[Key, Knee], stated: Mapping[Key, float | None]) -> str:
    """Rates in requests/s at 1 s per token; where the paper's curve ends before, none."""
    rows = [
        [n, name, stated[n, name], knee.rate, ratio(knee.rate, stated[n, name])]
        for (n, name), knee in knees.items()
    ]
    return table(["samples", "system", "published", "measured", "ratio"], rows)


def _picture(knees: Mapping[Key, Knee], published: Mapping[Key, Sequence[Point]]) -> Picture:
    shown = [
        Panel(
            f"{n} samples, OPT-13B, Alpaca",
            {name: knee.points for (own, name), knee in knees.items() if own == n},
            {name: points for (own, name), points in published.items() if own == n},
            1.6 * knees[n, "vLLM"].rate,
        )
        for n in dict.fromkeys(n for n, _ in knees)
    ]
    return draw(shown, level_s=LEVEL_S)


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
