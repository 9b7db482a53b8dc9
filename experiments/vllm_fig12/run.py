"""vLLM's Figure 12: the request rate that each system sustains, in six panels.

python -m experiments.vllm_fig12.run [--processes 2] [--fast]
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.published import curve
from experiments.study.rates import LOW_SHARES, Curve, draw, measured
from experiments.study.rates import Panel as Shown
from experiments.study.readme import mark, ratio, table
from experiments.vllm_fig12.second_fit import with_rows
from paxserve.claims.figure12 import (
    FITTED_HOST_S,
    PANELS,
    SHAREGPT,
    SYSTEMS,
    Panel,
    fitted_host_s,
    overrides,
)
from paxserve.claims.knees import Knee

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
SEEDS = (0, 1, 2)  # of arrivals and lengths, in the panels of ShareGPT
_TIE = 0.03  # published knees this near have no order

type Knees = Mapping[tuple[str, str], Knee]


def curve_of(
    panel: Panel,
    name: str,
    setting: Setting,
    *,
    host_s: float,
    row_s: float | None = None,
    seconds: float | None = None,
    seed: int = SEEDS[0],
) -> Curve:
    """What is measured of a system, or an arm, in a panel; low rates with the first seed only."""
    scale = setting.scale
    system = overrides(
        panel,
        (SYSTEMS | ARMS)[name],
        path=scale.trace(panel.trace),
        host_s=0.0 if name == NO_HOST else host_s,
    )
    if row_s is not None:
        system = [*system, f"cost_model.host_s_per_row={row_s:.6f}"]
    if seed != SEEDS[0]:
        system = [*system, f"seed={seed}"]
    return Curve(
        tuple(system),
        start=panel.knees[_published_as(name)],
        seconds=seconds or scale.of(SECONDS, 30),
        cells=setting.cells,
        tolerance=scale.of(5, 50) / 100,
        shares=() if scale.fast or seed != SEEDS[0] else LOW_SHARES,
    )


def study(setting: Setting) -> Findings:
    """All panels; `--fast`: two systems in the first one, with half a minute of arrivals."""
    scale = setting.scale
    panels = PANELS[: scale.of(len(PANELS), 1)]
    names = (*SYSTEMS, *ARMS) if not scale.fast else ("vLLM", "Orca Max")
    hosts = {panel.model: host_s_of(panel, setting) for panel in panels if panel.trace == SHAREGPT}
    asked = [
        (panel, name, seed)
        for panel in panels
        for name in names
        for seed in (SEEDS if panel.is_compared_exactly and not scale.fast else SEEDS[:1])
    ]
    curves = [
        curve_of(panel, name, setting, host_s=hosts[panel.model], seed=seed)
        for panel, name, seed in asked
    ]
    found = each(measured, curves, num_processes=setting.num_processes, what="knees")
    by_seed: dict[tuple[str, str], list[Knee]] = defaultdict(list)
    for (panel, name, _), knee in zip(asked, found, strict=True):
        by_seed[panel.letter, name].append(knee)
    knees = {
        key: own[0]._replace(rate=median([knee.rate for knee in own]))
        for key, own in by_seed.items()
    }
    tables = {
        "verdict": verdict(panels, knees),
        "knees": knee_table(panels, knees),
        "ratios": ratio_table(panels, knees),
        "overheads": overhead_table(panels, hosts),
    }
    if not scale.fast:
        tables["arms"] = arm_table(panels, knees)
        tables["seeds"] = seed_table(panels, by_seed)
        tables["second"] = second_table(setting, panels, knees)
        tables["hour"] = hour_table(setting, panels[0], hosts, knees)
    return Findings(tables, {"figure12": draw([shown(panel, knees, setting) for panel in panels])})


def shown(panel: Panel, knees: Knees, setting: Setting) -> Shown:
    """A panel of the picture."""
    published = {
        name: curve(
            setting.data,
            paper="vLLM SOSP23",
            figure="12",
            panel=f"{panel.letter}:",
            series=PAPER[name],
        )
        for name in SYSTEMS
    }
    return Shown(
        f"{panel.letter}: {panel.title}",
        {name: knees[panel.letter, name].points for name in _there(panel, knees)},
        {name: published[name] for name in _there(panel, knees)},
        1.25 * max(panel.knees.values()),
    )


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


def seed_table(panels: Iterable[Panel], by_seed: Mapping[tuple[str, str], list[Knee]]) -> str:
    """How much of a knee is chance: each seed's, and vLLM's over it with the same seed."""
    rows = []
    for panel in panels:
        for name in SYSTEMS if panel.is_compared_exactly else ():
            rates = [knee.rate for knee in by_seed[panel.letter, name]]
            best = [knee.rate for knee in by_seed[panel.letter, "vLLM"]]
            over = [ours / rate for ours, rate in zip(best, rates, strict=True)]
            spans = [f"{min(own):.3g} to {max(own):.3g}" for own in (rates, over)]
            rows.append([f"{panel.letter}: {panel.title}", name, *spans])
    return table(["panel", "system", f"knees of {len(SEEDS)} seeds", "vLLM over it"], rows)


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


def second_table(setting: Setting, panels: Sequence[Panel], knees: Knees) -> str:
    """Alpaca again, with what the host takes per row fitted too."""
    own = [panel for panel in panels if panel.letter in SECOND_FIT]
    asked = [(panel, name) for panel in own for name in ("vLLM", "Orca Oracle")]
    fits = {panel.letter: with_rows(panel, setting) for panel in own}
    curves = [curve_of(p, name, setting, **fits[p.letter]._asdict()) for p, name in asked]
    found = each(measured, curves, num_processes=setting.num_processes, what="knees, second fit")
    rows = []
    for (panel, name), knee in zip(asked, found, strict=True):
        fit, theirs = fits[panel.letter], panel.knees[name]
        ours = knees[panel.letter, name].rate
        rows.append(
            [
                f"{panel.letter}: {panel.title}",
                f"{1000 * fit.host_s:.1f} + {1000 * fit.row_s:.2f} per row",
                name,
                theirs,
                ratio(ours, theirs),
                knee.rate,
                ratio(knee.rate, theirs),
            ]
        )
    header = ["panel", "host, ms per step", "system", "published", "ratio before"]
    return table([*header, "measured", "ratio"], rows)


def hour_table(setting: Setting, panel: Panel, hosts: Mapping[str, float], knees: Knees) -> str:
    """The first panel with traces as long as the paper's."""
    names = ("vLLM", "Orca Max")
    curves = [
        curve_of(panel, name, setting, host_s=hosts[panel.model], seconds=3600) for name in names
    ]
    found = each(measured, curves, num_processes=setting.num_processes, what="knees of an hour")
    rows = [
        [name, panel.knees[name], knees[panel.letter, name].rate, knee.rate]
        for name, knee in zip(names, found, strict=True)
    ]
    return table([f"{panel.letter}: {panel.title}", "published", f"{SECONDS} s", "an hour"], rows)


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
    held = f"in all {number} {unit}"
    if failing:
        held = f"{number - len(failing)} of {number} {unit}; not {'; '.join(failing)}"
    return f"{mark(not failing)}{what}: {held}."


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
