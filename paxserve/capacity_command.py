"""`paxserve capacity`: a service level in, the highest rate that keeps it out.

Owns: its arguments, what it prints, and `capacity.json`. Must not know: how a rate is searched for
or measured.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paxserve.hydra_config import add_overrides
from paxserve.terminal import Terminal, table_console

if TYPE_CHECKING:
    from paxserve.capacity import Capacity, Probe


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    capacity = commands.add_parser("capacity", help="the highest rate that meets an SLO")
    add_overrides(capacity, about="as of paxserve run")
    capacity.add_argument("--slo", action="append", required=True, metavar="CONDITION", help=_SLO)
    capacity.add_argument("--tolerance", type=float, default=0.02, help="relative; default: 0.02")
    capacity.add_argument("--start", type=float, default=1.0, metavar="RATE", help=_START)
    capacity.add_argument("--lowest", type=float, metavar="RATE", help="default: start / 1024")
    capacity.add_argument("--highest", type=float, metavar="RATE", help="default: start * 1024")
    capacity.add_argument("--out", type=Path, help="directory; default: a new one under runs/")
    capacity.set_defaults(act=_capacity)


_SLO = (
    "a bound on a figure of summary.json (p99_itl_ms=100), or on requests and how many of them "
    "keep it ('ttft_ms<=400 tpot_ms<=100 share>=0.9'); may be given again"
)
_START = "the first rate that is tried, requests per second; default: 1"


def _capacity(arguments: argparse.Namespace) -> None:
    from paxserve.capacity_runs import find_capacity
    from paxserve.files import write_text
    from paxserve.results import new_run_path
    from paxserve.service_level import Slo

    slo = Slo.parse(arguments.slo)
    path = arguments.out or new_run_path(None)
    terminal = Terminal()
    try:
        found = find_capacity(
            arguments.overrides,
            slo,
            out=path,
            say=lambda message: None,  # the same for every probe
            progress=terminal.progress,
            on_probe=lambda probe: terminal.say(_said(probe)),
            tolerance=arguments.tolerance,
            start=arguments.start,
            lowest=arguments.lowest,
            highest=arguments.highest,
        )
    finally:
        terminal.close()
    write_text(path / "capacity.json", json.dumps(found.to_json(), indent=1, allow_nan=False))
    print_capacity(found)
    print(f"results: {path} (capacity.json; a run per probe)")


def _said(probe: "Probe") -> str:
    broken = ", ".join(f"{b.name} is {probe.figures[b.name]:.4g}" for b in probe.unmet)
    return f"rate {probe.rate:g}/s: {f'not met: {broken}' if broken else 'met'}"


def print_capacity(found: "Capacity", *, console: Console | None = None) -> None:
    """A line per probe, then the answer."""
    table = Table(title=f"capacity under {found.slo}", title_justify="left")
    table.add_column("rate, 1/s", justify="right")
    table.add_column("met")
    names = [bound.name for bound in found.slo.bounds]
    more = {"output_throughput": "tokens/s", "queue_growth": "queue growth"}
    for heading in (*names, *more.values()):
        table.add_column(heading, justify="right")
    for probe in found.probes:
        values = [probe.figures.get(name) for name in (*names, *more)]
        shown = ["-" if value is None else f"{value:.4g}" for value in values]
        table.add_row(f"{probe.rate:g}", "yes" if probe.is_met else "no", *shown)
    (console or table_console()).print(table)
    print(f"capacity: {found.answer()}")
    if not found.is_monotone:
        print("not every rate below one that meets the SLO meets it: more requests would say more")
