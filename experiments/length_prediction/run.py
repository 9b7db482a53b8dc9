"""Shortest output first, true or predicted: a burst of requests, and a steady overload.

python -m experiments.length_prediction.run [--processes 2] [--fast]
"""

from collections.abc import Mapping

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, ratio, table
from paxserve.claims.figure12 import LATENCY
from paxserve.metrics import Summary
from paxserve.report import style
from paxserve.report.style import Picture, panels, title

FILES = {
    3: "ssjf/predictions_warmup_cls_1000K.min.csv",
    5: "ssjf/predictions_warmup_multi_cls_1000K.min.csv",
}
_WORKLOAD = "workload=experiments.length_prediction.pairs:PredictedPairs"
_PREDICTED = ("baseline=sjf", "admission.length=predicted")


def _errs(sigma: float) -> tuple[str, ...]:
    return ("baseline=sjf", f"admission.error={sigma}")


ORDERS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "FCFS": (5, ("baseline=sjf", "admission=fcfs")),
    "SJF, true lengths": (5, ("baseline=sjf",)),
    "SJF, 5 classes": (5, _PREDICTED),
    "SJF, 3 classes": (3, _PREDICTED),
    "SJF, error 0.5": (5, _errs(0.5)),
    "SJF, error 1": (5, _errs(1.0)),
    "SJF, error 2": (5, _errs(2.0)),
    "SRPT, true lengths": (5, ("baseline=srpt",)),
    "SRPT, 5 classes": (5, ("baseline=srpt", "admission.length=predicted")),
}
LOADS = {"burst": 0.0, "steady overload": 40.0}  # requests/s (34 are served); 0: all at once
_PUBLISHED = 6.67 / 1.27  # FCFS over SJF


def study(setting: Setting) -> Findings:
    """Both loads; `--fast`: a burst, three orders, few requests."""
    scale = setting.scale
    loads = ("burst",) if scale.fast else tuple(LOADS)
    orders = tuple(ORDERS)[:3] if scale.fast else tuple(ORDERS)
    asked = [(load, name) for load in loads for name in orders]
    cells = [cell(setting, load, name) for load, name in asked]
    found = each(setting.cells.run, cells, num_processes=setting.num_processes, what="runs")
    runs = dict(zip(asked, found, strict=True))
    tables = {"verdict": verdict(runs), "orders": order_table(runs)}
    return Findings(tables, {} if scale.fast else {"orders": draw(runs)})


def cell(setting: Setting, load: str, name: str) -> list[str]:
    """The overrides of one run."""
    num_classes, order = ORDERS[name]
    return [
        "experiment=length_prediction",
        *order,
        _WORKLOAD,
        f"workload.path={setting.scale.trace(FILES[num_classes])}",
        f"workload.num_requests={setting.scale.of(2000, 300)}",
        f"workload.rate={LOADS[load]}",
    ]


type Runs = Mapping[tuple[str, str], Summary]


def verdict(runs: Runs) -> str:
    """FCFS over SJF, and what a predictor leaves of it."""
    gains = {name: _figure(runs, "burst", "FCFS") / _figure(runs, "burst", name)
             for load, name in runs if load == "burst"}  # fmt: skip
    best, predicted = gains["SJF, true lengths"], gains["SJF, 5 classes"]
    holds = best > 2 and 1 < predicted <= best
    return (
        f"{mark(holds)}In a burst FCFS takes {best:.1f} times the "
        f"mean latency per token of SJF with true lengths ({_PUBLISHED:.1f} times in the example "
        f"of the paper), {predicted:.1f} times that of SJF with five predicted classes."
    )


def order_table(runs: Runs) -> str:
    """Means and tails; and what displacing costs."""
    rows = []
    for (load, name), run in runs.items():
        own = _figure(runs, load, name)
        again = 100 * (run["recomputed_share_of_computed_tokens"] or 0.0)
        rows.append(
            [
                load,
                name,
                own,
                ratio(_figure(runs, load, "FCFS"), own),
                (run["mean_e2el_ms"] or 0.0) / 1000,
                (run["p99_e2el_ms"] or 0.0) / 1000,
                run["num_preemptions"],
                f"{again:.1f}",
            ]
        )
    header = ["load", "order", "s/token, mean", "FCFS over it", "e2e mean, s", "e2e p99, s"]
    return table([*header, "preemptions", "tokens computed again, %"], rows)


def draw(runs: Runs) -> Picture:
    """Mean latency per token, by load and order."""
    loads = list(dict.fromkeys(load for load, _ in runs))
    picture, axes = panels([2.8], columns=len(loads))
    for axis, load in zip(axes, loads, strict=True):
        values = {name: _figure(runs, own, name) for own, name in runs if own == load}
        bars = axis.barh(list(values), list(values.values()), color=style.BLUE, height=0.72)
        axis.bar_label(bars, fmt="%.2g", fontsize=8, padding=2)
        axis.invert_yaxis()
        axis.set_xlabel("mean latency, s per token")
        title(axis, load)
    return picture


def _figure(runs: Runs, load: str, name: str) -> float:
    found = runs[load, name][LATENCY]
    assert found is not None
    return found


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
