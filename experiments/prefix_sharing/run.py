"""A system prompt of 1,200 tokens that all requests begin with: with and without prefix caching.

python -m experiments.prefix_sharing.run [--processes 2] [--fast]
"""

from collections.abc import Mapping

from experiments.study.cells import each
from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, table
from paxserve.claims import Claim
from paxserve.claims.sharing import system_prompt
from paxserve.metrics import Summary
from paxserve.report import style
from paxserve.report.style import Picture, panels, title

RATES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
CACHES = {"no cache": "none", "hash chain": "hash_chain", "radix": "radix"}
SHOWN = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT median, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "mean_running_requests": "running",
    "computed_tokens": "computed tokens",
    "prefix_hit_rate": "hit rate",
}


def cell(rate: float, cache: str, *, num_requests: int) -> list[str]:
    """The overrides of one run; where nothing is cached no block is evicted either."""
    return [
        "experiment=prefix_sharing",
        f"prefix_cache={cache}",
        f"workload.arrivals.rate={rate}",
        f"workload.num_requests={num_requests}",
    ]


def study(setting: Setting) -> Findings:
    """The claim, exactly; then rates and caches. `--fast`: one rate, few requests."""
    rates = RATES[2:3] if setting.scale.fast else RATES
    num_requests = setting.scale.of(1000, 40)
    asked = [(rate, name) for rate in rates for name in CACHES]
    cells = [cell(rate, CACHES[name], num_requests=num_requests) for rate, name in asked]
    found = each(setting.cells.run, cells, num_processes=setting.num_processes, what="runs")
    runs = dict(zip(asked, found, strict=True))
    (claim,) = system_prompt(setting.scale)
    tables = {"verdict": verdict(claim), "exact": exact_table(claim), "rates": rate_table(runs)}
    return Findings(tables, {} if setting.scale.fast else {"rates": draw(runs)})


def verdict(claim: Claim) -> str:
    """Whether the claim holds."""
    return f"{mark(claim.holds)}{claim.claim} ({claim.note})."


def exact_table(claim: Claim) -> str:
    """The claim's figures, looked at after every step."""
    rows = [[name, str(claim.stated[name]), str(claim.measured[name])] for name in claim.stated]
    return table(["figure", "stated", "measured"], rows)


def rate_table(runs: Mapping[tuple[float, str], Summary]) -> str:
    """A line per rate and cache."""
    rows = []
    for (rate, name), run in runs.items():
        figures = [run[key] for key in SHOWN]
        rows.append([f"{rate:g}", name, *figures])
    return table(["requests/s", "cache", *SHOWN.values()], rows)


def draw(runs: Mapping[tuple[float, str], Summary]) -> Picture:
    """Median TTFT and running requests against the rate."""
    picture, (ttft, running) = panels([3.2], columns=2, width=10.0)
    for name, colour, marker in zip(CACHES, style.SERIES, style.MARKERS, strict=False):
        rates = [rate for rate, own in runs if own == name]
        for axis, key in ((ttft, "median_ttft_ms"), (running, "mean_running_requests")):
            values = [runs[rate, name][key] for rate in rates]
            axis.plot(rates, values, color=colour, marker=marker, markersize=4, label=name)
    ttft.set_yscale("log")
    ttft.set_ylabel("TTFT median, ms")
    running.set_ylabel("running requests, mean")
    for axis in (ttft, running):
        axis.set_xlabel("requests/s")
    ttft.legend(frameon=False, fontsize=9)
    title(ttft, "Llama-3-8B on an RTX 4090, 1,200 shared tokens")
    return picture


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)
