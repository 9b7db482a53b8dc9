"""What if a row cost the host something, too: two numbers fitted to two published points of vLLM.

Owns: the fit. In: a panel of Alpaca. Out: host seconds per step and per row. The figures that are
claimed do not use it: it only asks what is missing where they fail.
"""

from typing import NamedTuple

from experiments.study.door import Setting
from experiments.study.published import curve
from paxserve.claims.figure12 import (
    LATENCY,
    PANELS,
    SYSTEMS,
    Panel,
    at_rate,
    fitted_host_s,
    overrides,
)

_MOST_ROW_S = 2e-3


class Fit(NamedTuple):
    """Seconds of the host, per step and per row of it."""

    host_s: float
    row_s: float


def with_rows(panel: Panel, setting: Setting) -> Fit:
    """So that vLLM has its published latency at the lowest rates of ShareGPT and of Alpaca.

    Args:
        panel: of Alpaca.
        setting: of the study.
    """
    lowest = min(
        curve(
            setting.data,
            paper="vLLM SOSP23",
            figure="12",
            panel=f"{panel.letter}:",
            series="vLLM",
        )
    )
    (sharegpt,) = [p for p in PANELS[:3] if p.model == panel.model]

    def fit(row_s: float) -> tuple[Fit, float]:
        system = (*SYSTEMS["vLLM"], f"cost_model.host_s_per_row={row_s:.6f}")
        path = setting.scale.trace(sharegpt.trace)
        host_s = fitted_host_s(sharegpt, system, path=path, seconds=600, run=setting.cells.run)
        path = setting.scale.trace(panel.trace)
        cell = overrides(panel, system, path=path, host_s=host_s)
        cell += at_rate(lowest.rate, seconds=200)
        latency_s = setting.cells.run(cell)[LATENCY]
        assert latency_s is not None
        return Fit(host_s, row_s), latency_s

    low, high = 0.0, _MOST_ROW_S
    while high - low > 4e-5:
        found, latency_s = fit((low + high) / 2)
        low, high = (found.row_s, high) if latency_s < lowest.latency_s else (low, found.row_s)
    return fit((low + high) / 2)[0]
