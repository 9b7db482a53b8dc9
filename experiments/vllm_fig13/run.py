"""vLLM's Figure 13: how many requests run together, on average.

python -m experiments.vllm_fig13.run [--processes 2] [--fast]
"""

from typing import NamedTuple

from experiments.study.bars import grouped
from experiments.study.cells import Cells, each
from experiments.study.door import Findings, Setting, main
from experiments.study.published import value
from experiments.study.readme import mark, ratio, table
from paxserve.claims.batched import V0, num_running
from paxserve.claims.figure12 import PANELS, SYSTEMS, Panel
from paxserve.claims.overload import HEAVIER
from paxserve.report.style import Picture

PAPER = {
    "Orca Max": "Orca (Max)",
    "Orca Pow2": "Orca (Pow2)",
    "Orca Oracle": "Orca (Oracle)",
    "vLLM": "vLLM",
}
RATES = {"a": 2.0, "d": 30.0}  # requests/s, by the panel of Figure 12
FIGURES = {"a": "OPT-13B ShareGPT 2 req/s", "d": "OPT-13B Alpaca 30 req/s"}
FIRST = "vLLM V0, prompts first"
TOLERANCE = 0.2


class Task(NamedTuple):
    """One bar."""

    panel: Panel
    system: str
    factor: float
    path: str
    seconds: float
    cells: Cells


def measured(task: Task) -> float:
    """Requests that run together."""
    return num_running(
        task.panel,
        V0 if task.system == FIRST else SYSTEMS[task.system],
        path=task.path,
        rate=RATES[task.panel.letter],
        seconds=task.seconds,
        factor=task.factor,
        run=task.cells.run,
    )


def study(setting: Setting) -> Findings:
    """Both data sets; `--fast`: half a minute of arrivals."""
    scale = setting.scale
    panels = [panel for panel in PANELS if panel.letter in RATES]
    tasks = [
        Task(
            panel,
            name,
            factor,
            scale.trace(panel.trace),
            scale.of({"a": 1800, "d": 300}[panel.letter], 30),
            setting.cells,
        )
        for panel in panels
        for factor in ((1.0,) if scale.fast else (1.0, HEAVIER))
        for name in (*PAPER, FIRST)
    ]
    found = each(measured, tasks, num_processes=setting.num_processes, what="runs")
    sizes = {(t.panel.letter, t.system, t.factor): n for t, n in zip(tasks, found, strict=True)}
    published = {
        (panel.letter, name): value(
            setting.data,
            paper="vLLM SOSP23",
            figure="13",
            panel=FIGURES[panel.letter],
            series=series,
        )
        for panel in panels
        for name, series in PAPER.items()
    }
    tables = {"verdict": verdict(sizes, published), "sizes": size_table(sizes, published)}
    return Findings(tables, {"figure13": _picture(sizes, published)})


type Sizes = dict[tuple[str, str, float], float]
type Published = dict[tuple[str, str], float]


def verdict(sizes: Sizes, published: Published) -> str:
    """Bars further away than the tolerance."""
    far = [
        f"{name} with {FIGURES[letter].split()[1]} ({sizes[letter, name, 1.0] / stated:.2f})"
        for (letter, name), stated in published.items()
        if abs(sizes[letter, name, 1.0] - stated) > TOLERANCE * stated
    ]
    near = f"{len(published) - len(far)} of {len(published)} bars are within 20 %"
    return f"{mark(not far)}{near}{'; not ' if far else ''}{', '.join(far)}."


def size_table(sizes: Sizes, published: Published) -> str:
    """As drawn from the files, and with heavier lengths."""
    rows = []
    for (letter, name, factor), ours in sizes.items():
        theirs = published.get((letter, "vLLM" if name == FIRST else name))
        rows.append([FIGURES[letter], name, f"x {factor:g}", theirs, ours, ratio(ours, theirs)])
    return table(["run", "system", "lengths", "published", "measured", "ratio"], rows)


def _picture(sizes: Sizes, published: Published) -> Picture:
    groups = []
    for letter, heading in FIGURES.items():
        series = {"published": {name: published[letter, name] for name in PAPER}}
        for own, name, factor in sizes:
            if own == letter and name in PAPER:
                label = "measured" if factor == 1 else f"measured, lengths x {factor:g}"
                series.setdefault(label, {})[name] = sizes[own, name, factor]
        groups.append((heading, series))
    return grouped(groups, unit="requests that run together")


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
