"""`paxserve replay`: arguments in, a table of paired differences out.

Owns: its arguments and what it prints. Must not know: how anything is replayed.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paxserve.hydra_config import add_overrides
from paxserve.terminal import Terminal, table_console

if TYPE_CHECKING:
    from paxserve.replay import Replay


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    replay = commands.add_parser("replay", help="a saved run's requests under other policies")
    replay.add_argument("run", type=Path, metavar="RUN_DIR")
    add_overrides(replay, about=_OVERRIDES)
    replay.add_argument("--out", type=Path, help="directory; default: a new one under runs/")
    replay.set_defaults(act=_replay)


_OVERRIDES = "as of paxserve run, e.g. admission=sjf; executor=scripted needs no model"


def _replay(arguments: argparse.Namespace) -> None:
    from paxserve.replay import replay
    from paxserve.report.run_tables import RunTables

    terminal = Terminal()
    try:
        found = replay(
            RunTables.read(arguments.run),
            arguments.overrides,
            out=arguments.out,
            say=terminal.say,
            progress=terminal.progress,
        )
    finally:
        terminal.close()
    print_replay(found)


def print_replay(found: "Replay", *, console: Console | None = None) -> None:
    """A line per figure, and where everything lies."""
    table = Table(
        title=f"{len(found.records)} requests: with the overrides, less without",
        title_justify="left",
    )
    headings = ("s", "requests", "mean", "95 % of mean", "median", "better", "equal")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "s" else "right", no_wrap=True)
    for figure, one in found.figures.items():
        table.add_row(
            figure.removesuffix("_s"),
            str(one.num_requests),
            f"{one.mean:+.4g}",
            f"{one.low:+.4g} to {one.high:+.4g}",
            f"{one.median:+.4g}",
            f"{one.share_better:.0%}",
            f"{one.share_equal:.0%}",
        )
    (console or table_console()).print(table)
    print("arrivals as recorded, also of a closed loop; output lengths forced to the recorded ones")
    lost = len(found.second.refused) + sum(
        r.error is not None for r in found.second.engine.requests
    )
    if lost:
        print(f"{lost} requests could not be served with the overrides")
    print(f"results: {found.path}")
