"""`paxserve check-kernels`: what can be proven about the kernels without their hardware.

Owns: its arguments, the environment of the checks, and how their outcomes read. Must not know: what
a check does (`kernels_pallas/checks.py`), in which process (`check_processes.py`).
"""

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kernels_pallas.compile_environment import COMPILE_ENVIRONMENT
from paxserve import check_processes
from paxserve.files import write_text
from paxserve.results import check_writable
from paxserve.terminal import Terminal, table_console

if TYPE_CHECKING:
    from kernels_pallas.checks import Outcome
    from paxserve.device.whole_step import StepRow


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check-kernels", help="the kernels' numerics, races and compilation, without their hardware"
    )
    parser.add_argument("--quick", action="store_true", help="shapes that stand for the rest")
    parser.add_argument("--only", metavar="GLOB", help="checks whose name matches, as in '*h100'")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--step", action="store_true", help="whole model steps instead: minutes")
    modes.add_argument("--support", action="store_true", help="what each backend can do, at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--jobs", type=int, help="processes at once; default: one per core")
    parser.set_defaults(act=_check_kernels)


# The options that each mode reads.
_CHECKS, _STEP, _SUPPORT = ("quick", "only", "json", "jobs"), ("only", "json"), ()


def _refuse_unread(arguments: argparse.Namespace, mode: str, read: Sequence[str]) -> None:
    unread = [f"--{name}" for name in _CHECKS if name not in read and getattr(arguments, name)]
    if unread:
        raise ValueError(f"{mode} does not read {', '.join(unread)}: leave it out")


def _check_kernels(arguments: argparse.Namespace) -> int:
    """Ends with 1 if a check fails."""
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}")
    if arguments.support:
        _refuse_unread(arguments, "--support", _SUPPORT)
    if arguments.step:
        _refuse_unread(arguments, "--step", _STEP)
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    os.environ.update(COMPILE_ENVIRONMENT)  # read when jax is imported, here and by the processes
    if arguments.support:
        from kernels_pallas.support import table

        print("\n".join(table()))
        return 0
    if arguments.step:
        return _check_steps(arguments)
    from kernels_pallas.checks import NO_COMPILER, checks

    pattern = arguments.only or "*"
    chosen = [c for c in checks(quick=arguments.quick) if fnmatch.fnmatch(str(c), f"*{pattern}*")]
    if not chosen:
        raise ValueError(f"no check matches --only {arguments.only!r}")
    num_jobs = arguments.jobs or os.cpu_count() or 1
    started_s = time.perf_counter()
    terminal = Terminal()
    outcomes = []
    for outcome in check_processes.run(chosen, num_jobs=num_jobs):
        outcomes.append(outcome)
        terminal.progress("checks", len(outcomes), len(chosen))
        if outcome.verdict == "FAILED":
            terminal.say(f"FAILED {outcome.check}: {outcome.summary}")
    terminal.close()
    _print(outcomes)
    for line in _worst(outcomes):
        print(line)
    for line in sorted({o.detail for o in outcomes if o.verdict == NO_COMPILER}):
        print(line)
    counts = Counter(outcome.verdict for outcome in outcomes)
    seconds = time.perf_counter() - started_s
    missing = f", {counts[NO_COMPILER]} without a compiler" if counts[NO_COMPILER] else ""
    print(f"{counts['ok']} ok, {counts['FAILED']} failed{missing}; {seconds:.0f} s")
    if missing:
        print(_INSTALL)
    if arguments.json is not None:
        found = [_as_data(outcome) for outcome in outcomes]
        write_text(arguments.json, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return 0 if counts["ok"] == len(outcomes) else 1


def _check_steps(arguments: argparse.Namespace) -> int:
    """One after the other, since each takes all cores; ends with 1 if one cannot be compiled, does
    not fit where it must or the other way round, or takes more than an engine sets aside.
    """
    from kernels_pallas.compile_targets import TARGETS, NoCompiler
    from kernels_pallas.paged_attention import choose_backend
    from paxserve.device.whole_step import check_step, fault, named_cases

    pattern = f"*{arguments.only or '*'}*"
    cases = [c for c in named_cases() if fnmatch.fnmatch(f"{c.name} on {c.target}", pattern)]
    if not cases:
        raise ValueError(f"no step matches --only {arguments.only!r}")
    terminal, table, found = Terminal(), Table(*_STEP_COLUMNS, box=None), []
    for done, (name, target, case, must_fit) in enumerate(cases):
        terminal.progress("steps", done, len(cases))
        row: StepRow | None = None
        try:
            row = check_step(name, target, case, backend=choose_backend(TARGETS[target].platform))
            wrong = fault(row, must_fit=must_fit)
        except NoCompiler as error:
            wrong = f"{error}\n{_INSTALL}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            terminal.say(f"FAILED {name} on {target}: {wrong}")
        elif row is not None and row.refusal is not None:
            terminal.say(f"{name}: {row.refusal}")
        found.append({"name": name, "target": target, "fault": wrong})
        if row is not None:
            found[-1] |= row._asdict() | {"memory": row.memory and row.memory._asdict()}
            table.add_row(*_cells(row))
    terminal.close()
    table_console().print(table)
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(found, indent=1) + "\n")
    return 1 if any(step["fault"] is not None for step in found) else 0


def _cells(row: "StepRow") -> list[str]:
    """Of the table, in GiB of one device."""
    gib = 2**30
    sizes = [f"{n / gib:.1f}" for n in (row.hbm_bytes, row.weight_bytes, row.kv_bytes)]
    compiled = ["", "refused", ""]
    if row.memory is not None:
        compiled = [f"{row.memory.temp_bytes / gib:.2f}", f"{row.memory.total_bytes / gib:.1f}"]
        compiled.append(f"{row.seconds:.0f}")
    return [row.name, f"{row.target} x {row.num_devices}", *sizes, *compiled]


_INSTALL = (
    "no compiler: pip install --no-deps --target .venv/.compilers -r requirements-compilers.lock, "
    "and run with PYTHONPATH=.venv/.compilers (`make check-kernels` does both)"
)
_STEP_COLUMNS = ("step", "devices", "GiB each", "weights", "KV", "temporary", "total", "seconds")


def in_compiler_process[T](function: Callable[..., T], *arguments: object) -> T:
    """Call a function where JAX compiles for devices that are not there; whatever it raises.

    Raises:
        RuntimeError: a compiler took the process down.
    """
    os.environ.update(COMPILE_ENVIRONMENT)  # for the process, which imports jax
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise RuntimeError("the compiler's process died") from error


def _print(outcomes: "Sequence[Outcome]") -> None:
    """A line per subject; a column per target, in it the error beside its bound, or the seconds of
    the compiler, or the verdict.
    """
    targets = list(dict.fromkeys(outcome.check.target for outcome in outcomes))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in outcomes:
        check = outcome.check
        kind = check.kind if check.kind == "compile" else f"{check.kind} {check.backend}"
        cell = "" if outcome.verdict == "ok" else outcome.verdict
        if outcome.error is not None:
            cell = f"{cell} {outcome.error:.1e} of {outcome.bound:.0e}".lstrip()
        cell = cell or f"{outcome.seconds:.1f} s"
        found.setdefault((kind, check.case), {})[check.target] = cell
    table = Table("check", "subject", *targets, box=None)
    for (kind, subject), cells in sorted(found.items()):
        table.add_row(kind, subject, *[cells.get(target, "") for target in targets])
    table_console().print(table)


def _as_data(outcome: "Outcome") -> dict[str, Any]:
    """JSON has no infinity, the error of an answer that is not finite: the detail says it."""
    is_finite = outcome.error is not None and math.isfinite(outcome.error)
    return asdict(outcome) | {"error": outcome.error if is_finite else None}


def _worst(outcomes: "Sequence[Outcome]") -> Iterator[str]:
    """The largest share of its bound, for each kind of check and backend that compares numbers."""
    found: dict[str, tuple[float, Outcome]] = {}
    for outcome in outcomes:
        if outcome.error is None or outcome.bound is None:
            continue
        name = f"{outcome.check.kind} {outcome.check.backend}"
        share = outcome.error / outcome.bound
        if name not in found or not share <= found[name][0]:  # a NaN is the worst
            found[name] = share, outcome
    for name, (share, outcome) in sorted(found.items()):
        yield f"worst of {name}: {outcome.detail} ({share:.0%}), {outcome.check.case}"
