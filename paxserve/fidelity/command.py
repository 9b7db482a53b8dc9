"""`paxserve fidelity`: arguments in, a table, a file and an exit code out.

Owns: its arguments. Must not know: how runs are made or compared; that is imported when needed.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paxserve.calibrate.command import check_at_least_one, print_profile
from paxserve.fidelity.report import as_data, print_trial
from paxserve.files import write_text
from paxserve.hydra_config import add_overrides
from paxserve.results import check_writable
from paxserve.terminal import Terminal

if TYPE_CHECKING:
    from paxserve.cost_model import Costs
    from paxserve.fidelity.bench import Bench
    from paxserve.step_profile import Profile

REPEATS, REPETITIONS = 5, 3


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; `act` returns its exit code."""
    fidelity = commands.add_parser("fidelity", help="one workload real and simulated, compared")
    add_overrides(fidelity, about=_OVERRIDES)
    fidelity.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=_REPEATS)
    fidelity.add_argument("--load", type=float, metavar="SHARE", help=_LOAD)
    fidelity.add_argument("--calibrate", action="store_true", help=_CALIBRATE)
    fidelity.add_argument("--repetitions", type=int, metavar="N", help=_REPETITIONS)
    fidelity.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    fidelity.set_defaults(act=_fidelity)


_OVERRIDES = "as of paxserve run with executor=real; cost_model and hardware of the simulated runs"
_REPEATS = f"real runs, and simulated ones, in turn; default: {REPEATS}"
_LOAD = "spread arrivals to this share of the rate that the engine serves; default: as they are"
_CALIBRATE = "measure steps anew before each real run, instead of the chosen cost_model"
_REPETITIONS = f"with --calibrate: how often each step is measured; default: {REPETITIONS}"


def _fidelity(arguments: argparse.Namespace) -> int:
    from paxserve.compose import load
    from paxserve.fidelity.bench import Bench
    from paxserve.fidelity.trial import hold_trial
    from paxserve.hydra_config import compose_config

    _check(arguments)
    config, choices, explicit = compose_config(arguments.overrides)
    terminal, profiles = Terminal(), list["Profile"]()
    try:
        bench = Bench.made(
            config,
            choices=choices,
            explicit=explicit,
            say=terminal.say,
            progress=terminal.progress,
            reads=("hardware",) if arguments.calibrate else ("hardware", "cost_model"),
        )

        costs = (
            _anew(bench, profiles, arguments)
            if arguments.calibrate
            else _chosen(
                bench.costs(load("cost_model", choices["cost_model"], config["cost_model"]))
            )
        )
        trial = hold_trial(bench, costs, repeats=arguments.repeats, load=arguments.load)
    finally:
        terminal.close()
    print_trial(trial)
    for profile in profiles[-1:]:
        print_profile(profile)
    if arguments.json is not None:
        data = as_data(trial, profiles, bench) | {"overrides": arguments.overrides}
        write_text(arguments.json, json.dumps(data, indent=1) + "\n")
    return 0 if trial.holds else 1


def _chosen(costs: "Costs") -> Callable[[int], "Costs"]:
    """The same in every turn."""
    return lambda turn: costs


def _anew(
    bench: "Bench", profiles: list["Profile"], arguments: argparse.Namespace
) -> Callable[[int], "Costs"]:
    """Measured in every turn, and kept in `profiles`."""
    from paxserve.calibrate.profiling import calibrate

    def costs(turn: int) -> "Costs":
        bench.say(f"calibration {turn + 1} of {arguments.repeats}")
        repetitions = arguments.repetitions or REPETITIONS
        profiles.append(calibrate(bench, repetitions=repetitions, seed=bench.seed + turn))
        return profiles[-1].costs()

    return costs


def _check(arguments: argparse.Namespace) -> None:
    check_at_least_one("--repeats", arguments.repeats)
    if arguments.repetitions is not None:
        check_at_least_one("--repetitions", arguments.repetitions)
        if not arguments.calibrate:
            raise ValueError("--repetitions was set, but nothing reads it without --calibrate")
    if arguments.load is not None and not 0 < arguments.load < 1:
        raise ValueError(f"--load must be a share above 0 and below 1, got {arguments.load}")
    if arguments.json is not None:
        check_writable("--json", arguments.json)
