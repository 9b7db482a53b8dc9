"""`paxserve calibrate`: arguments in, a profile and a table of its errors out.

Owns: its arguments and what it prints. Must not know: how steps are measured; that is imported when
needed.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paxserve.hydra_config import add_overrides
from paxserve.results import check_writable
from paxserve.terminal import Terminal, table_console

if TYPE_CHECKING:
    from paxserve.step_profile import Profile

REPETITIONS = 5


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    calibrate = commands.add_parser("calibrate", help="measure what steps take on this device")
    add_overrides(calibrate, about=_OVERRIDES)
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE", help=_OUT)
    calibrate.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N", help=_OFTEN)
    calibrate.set_defaults(act=_calibrate)


_OVERRIDES = "as of paxserve run: model, limits, kernel, sampling; and hardware, what this is"
_OUT = "the profile, for cost_model=fitted cost_model.path=FILE"
_OFTEN = f"how often each step is measured; default: {REPETITIONS}"


def check_at_least_one(option: str, number: int) -> None:
    """Raises:
    ValueError: it is none.
    """
    if number < 1:
        raise ValueError(f"{option} must be at least 1, got {number}")


def _calibrate(arguments: argparse.Namespace) -> None:
    from paxserve.calibrate.profiling import calibrate
    from paxserve.calibrate.watching import NoRequests
    from paxserve.fidelity.bench import Bench
    from paxserve.hydra_config import compose_config
    from paxserve.step_profile import write_profile

    check_writable("--out", arguments.out)
    check_at_least_one("--repetitions", arguments.repetitions)
    config, choices, explicit = compose_config(arguments.overrides)
    terminal = Terminal()
    try:
        bench = Bench.made(
            config,
            choices=choices,
            explicit=explicit,
            say=terminal.say,
            progress=terminal.progress,
            workload=NoRequests(),
        )
        profile = calibrate(bench, repetitions=arguments.repetitions, seed=bench.seed)
    finally:
        terminal.close()
    write_profile(arguments.out, profile)
    print_profile(profile)
    print(f"profile: {arguments.out}")


def print_profile(profile: "Profile", *, console: Console | None = None) -> None:
    """A line per kind of steps: how far their predictions are off."""
    table = Table(title=f"steps on {profile.device}: predicted", title_justify="left")
    for heading in ("steps", "number", "median absolute error", "error of their sum"):
        table.add_column(heading, justify="left" if heading == "steps" else "right")
    for of, errors in profile.errors.items():
        table.add_row(
            _MEANING[of],
            str(errors.num_steps),
            f"{errors.median_absolute:.1%}",
            f"{errors.summed_bias:+.1%}",
        )
    (console or table_console()).print(table)
    host = f"{1e6 * profile.host_s_per_step:.0f} us and {1e6 * profile.host_s_per_row:.1f} us a row"
    print(f"between two steps: {host}")


_MEANING = {
    "fitted": "fitted to",
    "held_out": "held out: other shapes",
    "served": "held out: of served requests",
}
