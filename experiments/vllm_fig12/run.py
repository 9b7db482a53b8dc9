"""vLLM's Figure 12: the request rate that each system sustains, in six panels.

python -m experiments.vllm_fig12.run [--processes 2] [--fast]
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from experiments.study.cells import Cells, each
from experiments.study.door import Findings, Setting, main
from experiments.study.published import curve
from experiments.study.readme import ratio, table
from experiments.vllm_fig12.picture import draw
from experiments.vllm_fig12.second_fit import with_rows
from paxserve.claims.figure12 import (
    FITTED_HOST_S,
    LATENCY,
    PANELS,
    SHAREGPT,
    SYSTEMS,
    Panel,
    fitted_host_s,
    knee_of,
    overrides,
)
from paxserve.claims.knees import Knee, Point

PAPER = {
    "vLLM": "vLLM",
    "Orca Oracle": "Oracle",
    "Orca Pow2": "Pow2",
    "Orca Max": "Max",
    "static": "FT",
}
V0, NO_HOST = "vLLM V0, prompts first", "static, no host time"
ARMS = {V0: ("baseline=vllm_v0",), NO_HOST: SYSTEMS["static"]}
TOLERANCE = 0.25
SECONDS = 900  # of arrivals: as the paper's traces with OPT-175B; those of the others are an hour
SECOND_FIT = ("d", "e")
_TIE = 0.03  # published knees this near have no order
_SHARES = (0.25, 0.5, 0.75)  # of the knee: points of the curve at low load


class Task(NamedTuple):
    """A knee to be found: of a system, or an arm, in a panel."""

    panel: Panel
    name: str
    path: str
    seconds: float
    host_s: float
    row_s: float | None
    tolerance: float
    shares: tuple[float, ...]
    cells: Cells


def measured(task: Task) -> Knee:
    """The knee, with points at low load in its curve."""
    system = (SYSTEMS | ARMS)[task.name]
    if task.row_s is not None:
        system = (*system, f"cost_model.host_s_per_row={task.row_s:.6f}")
    host_s = 0.0 if task.name == NO_HOST else task.host_s
    found = knee_of(
        task.panel,
        system,
        path=task.path,
        start=task.panel.knees[_published_as(task.name)],
        seconds=task.seconds,
        host_s=host_s,
        run=task.cells.run,
        tolerance=task.tolerance,
    )
    low = []
    for share in task.shares:
        cell = overrides(
            task.panel,
            system,
            path=task.path,
            rate=share * found.rate,
            seconds=task.seconds / 3,  # settled long before
            host_s=host_s,
        )
        low.append(Point(share * found.rate, task.cells.run(cell)[LATENCY]))
    return Knee(found.rate, tuple(sorted((*low, *found.points))))


def study(setting: Setting) -> Findings:
    """All panels; `--fast`: two systems in the first one, with half a minute of arrivals."""
    scale = setting.scale
    panels = PANELS[: scale.of(len(PANELS), 1)]
    names = (*SYSTEMS, *ARMS) if not scale.fast else ("vLLM", "Orca Max")
    hosts = {panel.model: host_s_of(panel, setting) for panel in panels if panel.trace == SHAREGPT}
    tasks = [
        Task(
            panel,
            name,
            scale.trace(panel.trace),
            scale.of(SECONDS, 30),
            hosts[panel.model],
            None,
            scale.of(5, 50) / 100,
            () if scale.fast else _SHARES,
            setting.cells,
        )
        for panel in panels
        for name in names
    ]
    found = each(measured, tasks, num_processes=setting.num_processes, what="knees")
    knees = {(t.panel.letter, t.name): knee for t, knee in zip(tasks, found, strict=True)}
    tables = {
        "verdict": verdict(panels, knees),
        "knees": knee_table(panels, knees),
        "ratios": ratio_table(panels, knees),
        "overheads": overhead_table(panels, hosts),
    }
    if not scale.fast:
        tables["arms"] = arm_table(panels, knees)
        tables["second"] = second_table(setting, tasks, knees)
        tables["hour"] = hour_table(setting, tasks, knees)
    curves = {
        (panel.letter, name): curve(
            setting.data,
            paper="vLLM SOSP23",
            figure="12",
            panel=f"{panel.letter}:",
            series=PAPER[name],
        )
        for panel in panels
        for name in SYSTEMS
    }
    return Findings(tables, {"figure12": draw(panels, knees, curves)})


def host_s_of(panel: Panel, setting: Setting) -> float:
    """The one number fitted for the panel's model; `--fast` takes it as it was fitted before."""
    if setting.scale.fast:
        return FITTED_HOST_S[panel.model]
    return fitted_host_s(
        panel,
        SYSTEMS["vLLM"],
        path=setting.scale.trace(SHAREGPT),
        seconds=SECONDS,
        run=setting.cells.run,
    )


type Knees = Mapping[tuple[str, str], Knee]


def verdict(panels: Sequence[Panel], knees: Knees) -> str:
    """What holds and what does not, first of all."""
    disordered = {panel.letter: disorder(panel, knees) for panel in panels}
    lines = [
        _line(
            "The order of the systems",
            [f"{letter} ({', '.join(pairs)})" for letter, pairs in disordered.items() if pairs],
            len(panels),
            "panels",
        )
    ]
    exact = [panel for panel in panels if panel.is_compared_exactly]
    ratios = [(panel, name) for panel in exact for name in _there(panel, knees)[1:]]
    lines.append(
        _line(
            "The knee of vLLM over that of each other system, ShareGPT, within 25 %",
            [f"{name} in {p.letter}" for p, name in ratios if not _is_near(_over(p, name, knees))],
            len(ratios),
            "ratios",
        )
    )
    absolute = [(panel, name) for panel in panels for name in _there(panel, knees)]
    lines.append(
        _line(
            "Absolute knees within 25 %",
            [
                f"{name} in {p.letter}"
                for p, name in absolute
                if not _is_near((knees[p.letter, name].rate, p.knees[name]))
            ],
            len(absolute),
            "knees",
        )
    )
    return "\n".join(lines)


def disorder(panel: Panel, knees: Knees) -> list[str]:
    """Pairs of systems that stand the other way round than published."""
    return [
        f"{first} under {second}"
        for first, second in combinations(_there(panel, knees), 2)
        if panel.knees[first] > (1 + _TIE) * panel.knees[second]
        and knees[panel.letter, first].rate <= knees[panel.letter, second].rate
    ]


def knee_table(panels: Iterable[Panel], knees: Knees) -> str:
    """Published beside measured, in requests per s."""
    rows = []
    for panel in panels:
        for name in _there(panel, knees):
            ours, theirs = knees[panel.letter, name].rate, panel.knees[name]
            rows.append([f"{panel.letter}: {panel.title}", name, theirs, ours, ratio(ours, theirs)])
    return table(["panel", "system", "published", "measured", "ratio"], rows)


def ratio_table(panels: Iterable[Panel], knees: Knees) -> str:
    """How many times the rate of each other system vLLM sustains."""
    rows = []
    for panel in panels:
        for name in _there(panel, knees)[1:]:
            ours, theirs = _over(panel, name, knees)
            rows.append([f"{panel.letter}: {panel.title}", name, theirs, ours, ratio(ours, theirs)])
    return table(["panel", "vLLM over", "published", "measured", "ratio"], rows)


def arm_table(panels: Iterable[Panel], knees: Knees) -> str:
    """What the same cells are with one thing changed."""
    rows = [
        [
            f"{panel.letter}: {panel.title}",
            name,
            panel.knees[_published_as(name)],
            knees[panel.letter, _published_as(name)].rate,
            knees[panel.letter, name].rate,
        ]
        for panel in panels
        for name in ARMS
    ]
    return table(["panel", "arm", "published", "as above", "with the change"], rows)


def overhead_table(panels: Iterable[Panel], hosts: Mapping[str, float]) -> str:
    """The one number that was fitted per model."""
    floors = {panel.model: panel.floor for panel in panels}
    rows = [
        [model, floors[model].rate, floors[model].latency_s, 1000 * host_s]
        for model, host_s in hosts.items()
    ]
    return table(["model", "at, req/s", "vLLM's latency, s/token", "host, ms per step"], rows)


def second_table(setting: Setting, tasks: Iterable[Task], knees: Knees) -> str:
    """Alpaca again, with what the host takes per row fitted too."""
    chosen = [t for t in tasks if t.panel.letter in SECOND_FIT and t.name in SYSTEMS]
    sharegpt = setting.scale.trace(SHAREGPT)
    fits = {
        task.panel.letter: with_rows(task.panel, setting, paths=(sharegpt, task.path))
        for task in chosen
        if task.name == "vLLM"
    }
    again = [
        task._replace(host_s=fits[task.panel.letter].host_s, row_s=fits[task.panel.letter].row_s)
        for task in chosen
    ]
    found = each(measured, again, num_processes=setting.num_processes, what="knees, second fit")
    rows = []
    for task, knee in zip(again, found, strict=True):
        fit, theirs = fits[task.panel.letter], task.panel.knees[task.name]
        ours = knees[task.panel.letter, task.name].rate
        fitted = f"{1000 * fit.host_s:.1f} + {1000 * fit.row_s:.2f} per row"
        rows.append(
            [
                f"{task.panel.letter}: {task.panel.title}",
                fitted,
                task.name,
                theirs,
                ratio(ours, theirs),
                knee.rate,
                ratio(knee.rate, theirs),
            ]
        )
    header = ["panel", "host, ms per step", "system", "published", "ratio before"]
    return table([*header, "measured", "ratio"], rows)


def hour_table(setting: Setting, tasks: Iterable[Task], knees: Knees) -> str:
    """The first panel with traces as long as the paper's."""
    chosen = ("vLLM", "Orca Max")
    longer = [
        task._replace(seconds=3600)
        for task in tasks
        if task.panel.letter == "a" and task.name in chosen
    ]
    found = each(measured, longer, num_processes=setting.num_processes, what="knees of an hour")
    rows = [
        [task.name, task.panel.knees[task.name], knees["a", task.name].rate, knee.rate]
        for task, knee in zip(longer, found, strict=True)
    ]
    return table(["a: OPT-13B, ShareGPT", "published", f"{SECONDS} s", "an hour"], rows)


def _there(panel: Panel, knees: Knees) -> list[str]:
    """The systems whose knees were looked for."""
    return [name for name in SYSTEMS if (panel.letter, name) in knees]


def _over(panel: Panel, name: str, knees: Knees) -> tuple[float, float]:
    """Ours and theirs."""
    ours = knees[panel.letter, "vLLM"].rate / knees[panel.letter, name].rate
    return ours, panel.knees["vLLM"] / panel.knees[name]


def _is_near(pair: tuple[float, float]) -> bool:
    ours, theirs = pair
    return abs(ours - theirs) <= TOLERANCE * theirs


def _published_as(name: str) -> str:
    return {V0: "vLLM", NO_HOST: "static"}.get(name, name)


def _line(what: str, failing: Sequence[str], number: int, unit: str) -> str:
    if not failing:
        return f"- **Holds.** {what}: in all {number} {unit}."
    held = number - len(failing)
    return f"- **Does not hold.** {what}: {held} of {number} {unit}; not {'; '.join(failing)}."


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
