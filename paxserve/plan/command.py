"""`paxserve plan`: what a model takes on some hardware, before there are weights or a device.

Owns: its arguments, and which settings a plan reads. Must not know: how anything is counted or
shown.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paxserve.batching import Batching
from paxserve.compose import load
from paxserve.engines import cost_model, dimensions, hardware
from paxserve.files import write_text
from paxserve.hydra_config import add_overrides, compose_config
from paxserve.numbers import real
from paxserve.plan import MOST_S, Demand, Setup
from paxserve.plan.compiled import workspace_bytes
from paxserve.plan.plan import Plan, make_plan
from paxserve.plan.table import print_plan
from paxserve.results import check_writable
from paxserve.settings import EngineSettings, Knobs, from_section
from paxserve.terminal import Terminal

_SHORT = {"tp": "limits.tensor_parallel_size"}
_DEFAULTS = Demand()
# What the pool and the steps of an engine do not depend on.
_UNREAD = (
    "swap_space_gib",
    "num_host_blocks_override",
    "preempt_every_steps",
    "row_buckets",
    "token_buckets",
)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    plan = commands.add_parser(
        "plan", help="memory, batch sizes, step times and limits, without weights or a device"
    )
    add_overrides(plan, about=_OVERRIDES)
    for name in ("input_tokens", "output_tokens"):
        plan.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(_DEFAULTS, name),
            metavar="N",
            help=f"of a request; default: {getattr(_DEFAULTS, name)}",
        )
    plan.add_argument(
        "--tpot-ms",
        type=float,
        default=_DEFAULTS.tpot_s * 1e3,
        metavar="MS",
        help=f"no step may take longer; default: {_DEFAULTS.tpot_s * 1e3:g}",
    )
    plan.add_argument("--compile", action="store_true", help=_COMPILE)
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, too")
    plan.set_defaults(act=_plan)


_OVERRIDES = "as of paxserve run: model=llama-3-70b hardware=h100 tp=4 limits.max_num_seqs=128"
_COMPILE = "ask the device's compiler for the memory of a step, in place of the estimate"


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    demand = Demand(
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        tpot_s=real("--tpot-ms", arguments.tpot_ms, high=MOST_S * 1e3, above=True) / 1e3,
    )
    setup, name = setup_of(arguments.overrides)
    if arguments.compile:
        Terminal().say("compiling the largest step; minutes for a large model")
        setup = replace(setup, workspace_bytes=workspace_bytes(setup))
    plan = make_plan(setup, demand)
    print_plan(plan, name=name)
    if arguments.json is not None:
        write_text(arguments.json, to_json(plan, name=name))


def setup_of(overrides: Sequence[str]) -> tuple[Setup, str]:
    """What `paxserve run executor=simulated` with these overrides would serve, and the name of the
    model.

    Raises:
        ValueError: settings that are wrong, or that a plan does not read.
    """
    plain, choices, explicit = compose_config(_spelled(overrides))
    knobs = Knobs(plain, explicit)
    settings = _settings(knobs)
    knobs.used("batching")
    batching: Batching = load("batching", choices["batching"], knobs.plain("batching"))
    setup = Setup(
        model=dimensions(knobs),
        hardware=hardware(knobs),
        cost_model=cost_model(knobs, choices["cost_model"]),
        settings=settings,
        whole_prompts=batching.whole_prompts,
    )
    knobs.check_all_read()
    return setup, str(knobs.plain("model").get("name", choices["model"]))


def to_json(plan: Plan, *, name: str) -> str:
    """Every figure, in the units of its name; null where there is none."""
    return json.dumps({"model": name, **asdict(plan)}, indent=1, allow_nan=False) + "\n"


def _settings(knobs: Knobs) -> EngineSettings:
    knobs.chosen("limits")
    section = knobs.section("limits")
    is_given = knobs.plain("limits").get("kv_cache_memory_bytes")
    unread = (*_UNREAD, *(("memory_utilization",) if is_given else ()))
    return from_section(
        EngineSettings, section, unread=unread, elsewhere=("kernel", "debug", "strict")
    )


def _spelled(overrides: Sequence[str]) -> list[str]:
    """`tp=4` as `limits.tensor_parallel_size=4`."""
    spelled: dict[str, tuple[str, str]] = {}  # full key -> its value, and as it was given
    made = []
    for override in overrides:
        short, separator, value = override.partition("=")
        key = _SHORT.get(short, short)
        before, given = spelled.setdefault(key, (value, override))
        if key in _SHORT.values() and before != value:
            raise ValueError(f"{given} and {override} are one setting: give it once")
        made.append(f"{key}{separator}{value}")
    return made
