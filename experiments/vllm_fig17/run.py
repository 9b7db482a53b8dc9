"""vLLM's Figure 17: a chatbot with 1,024 tokens of history in every prompt.

python -m experiments.vllm_fig17.run [--processes 2] [--fast]
"""

from collections.abc import Mapping

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.published import curve
from experiments.study.rates import LOW_SHARES, Curve, Panel, draw, measured
from experiments.study.readme import mark, ratio, table
from paxserve.claims.figure12 import FITTED_HOST_S, SHAREGPT, SYSTEMS
from paxserve.claims.knees import Knee

PAPER = {"vLLM": "vLLM", "Orca Oracle": "Oracle", "Orca Pow2": "Pow2", "Orca Max": "Max"}
KNEES = {"vLLM": 0.80, "Orca Oracle": 0.53, "Orca Pow2": 0.52, "Orca Max": 0.48}
TOLERANCE = 0.25


def system(name: str, *, path: str) -> tuple[str, ...]:
    """Overrides, but for the rate."""
    return (
        "experiment=sosp23_fig17",
        *SYSTEMS[name],
        f"workload.lengths.path={path}",
        f"cost_model.host_s_per_step={FITTED_HOST_S['OPT-13B']}",
    )


def study(setting: Setting) -> Findings:
    """Four systems; `--fast`: two of them, with a minute of arrivals."""
    scale = setting.scale
    names = ("vLLM", "Orca Max") if scale.fast else tuple(PAPER)
    curves = [
        Curve(
            system(name, path=scale.trace(SHAREGPT)),
            start=KNEES[name],
            seconds=scale.of(1800, 60),
            cells=setting.cells,
            tolerance=scale.of(5, 50) / 100,
            shares=() if scale.fast else LOW_SHARES,
        )
        for name in names
    ]
    found = each(measured, curves, num_processes=setting.num_processes, what="knees")
    knees = dict(zip(names, found, strict=True))
    published = {
        name: curve(setting.data, paper="vLLM SOSP23", figure="17", panel="", series=PAPER[name])
        for name in names
    }
    points = {name: knee.points for name, knee in knees.items()}
    shown = Panel("Chatbot, OPT-13B: prompts of 1,024 tokens", points, published, 1.2)
    tables = {"verdict": verdict(knees), "knees": knee_table(knees)}
    return Findings(tables, {"figure17": draw([shown])})


def verdict(knees: Mapping[str, Knee]) -> str:
    """Ratios of vLLM's knee to the Orcas', and how far the Orcas are apart."""
    orcas = [knee.rate for name, knee in knees.items() if name != "vLLM"]
    far = [
        name
        for name in knees
        if abs(knees["vLLM"].rate / knees[name].rate / (KNEES["vLLM"] / KNEES[name]) - 1)
        > TOLERANCE
    ]
    holds = not far and knees["vLLM"].rate > max(orcas)
    apart = f"all but {', '.join(far)}" if far else "all"
    return (
        f"{mark(holds)}vLLM sustains {knees['vLLM'].rate / max(orcas):.2f} to "
        f"{knees['vLLM'].rate / min(orcas):.2f} times what the Orcas do (figure: 1.51 to 1.67 "
        f"at 0.2 s per token, in the text twice); ratios within 25 %: {apart}."
    )


def knee_table(knees: Mapping[str, Knee]) -> str:
    """At 0.2 s per token, in requests/s."""
    rows = []
    for name, knee in knees.items():
        over = knees["vLLM"].rate / knee.rate
        stated = KNEES["vLLM"] / KNEES[name]
        rows.append([name, KNEES[name], knee.rate, ratio(knee.rate, KNEES[name]), stated, over,
                     ratio(over, stated)])  # fmt: skip
    header = ["system", "published", "measured", "ratio", "vLLM over it, published"]
    return table([*header, "measured", "ratio"], rows)


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
