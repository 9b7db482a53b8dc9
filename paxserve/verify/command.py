"""`paxserve verify`: arguments in, a table and an exit code out.

Owns: its arguments. Must not know: how cells are chosen or run; those are imported when needed.
"""

import argparse
import json
from pathlib import Path

from paxserve.hydra_config import add_overrides
from paxserve.terminal import Terminal


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; `act` returns its exit code."""
    verify = commands.add_parser(
        "verify", help="serve a workload under many policies and compare every token"
    )
    add_overrides(verify, about="as of paxserve run")
    verify.add_argument("--quick", action="store_true", help=_QUICK)
    verify.add_argument("--only", action="append", default=[], metavar="AXIS=NAME,..", help=_ONLY)
    verify.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    verify.set_defaults(act=_verify)


_QUICK = "every choice in one cell, instead of every two choices of different axes"
_ONLY = "only these choices of an axis; may be given again"


def _verify(arguments: argparse.Namespace) -> int:
    from paxserve.hydra_config import compose_config
    from paxserve.verify.report import as_data, lines
    from paxserve.verify.running import verify

    config, choices, explicit = compose_config(arguments.overrides)
    terminal = Terminal()
    try:
        found = verify(
            config,
            choices=choices,
            explicit=explicit,
            say=terminal.say,
            progress=terminal.progress,
            only=arguments.only,
            quick=arguments.quick,
        )
    finally:
        terminal.close()
    print("\n".join(lines(found)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_data(found), indent=1), encoding="utf-8")
    return 0 if found.holds else 1
