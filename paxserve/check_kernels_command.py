"""`paxserve check-kernels`: what can be proven about the kernels without their hardware.

Owns: its arguments, the environment and processes of the checks, and how their outcomes read. Must
not know: what a check does (`kernels_pallas/checks.py`).
"""

import argparse
import fnmatch
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kernels_pallas.compile_environment import COMPILE_ENVIRONMENT
from paxserve.results import write_text
from paxserve.terminal import Terminal

if TYPE_CHECKING:
    from kernels_pallas.checks import Check, Outcome


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check-kernels", help="the kernels' numerics, races and compilation, without their hardware"
    )
    parser.add_argument("--quick", action="store_true", help="shapes that stand for the rest")
    parser.add_argument("--only", metavar="GLOB", help="checks whose name matches, as in '*h100'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.set_defaults(act=_check_kernels)


def _check_kernels(arguments: argparse.Namespace) -> int:
    """Ends with 1 if a check fails."""
    os.environ.update(COMPILE_ENVIRONMENT)  # read when jax is imported, here and by the processes
    from kernels_pallas.checks import checks

    pattern = arguments.only or "*"
    chosen = [c for c in checks(quick=arguments.quick) if fnmatch.fnmatch(str(c), f"*{pattern}*")]
    if not chosen:
        raise ValueError(f"no check matches --only {arguments.only!r}")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}")
    started_s = time.perf_counter()
    terminal = Terminal()
    outcomes = []
    for outcome in _run(chosen, num_jobs=arguments.jobs):
        outcomes.append(outcome)
        terminal.progress("checks", len(outcomes), len(chosen))
        if outcome.verdict == "FAILED":
            terminal.say(f"FAILED {outcome.check}: {outcome.detail}")
    terminal.close()
    _print(outcomes)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(
        f"{counts['ok']} ok, {counts['FAILED']} failed, {counts['n/a']} not available on their "
        f"backend; {time.perf_counter() - started_s:.0f} s"
    )
    if arguments.json is not None:
        found = [asdict(outcome) for outcome in outcomes]
        write_text(arguments.json, json.dumps(found, indent=1) + "\n")
    return 1 if counts["FAILED"] else 0


def _run(chosen: "Sequence[Check]", *, num_jobs: int) -> "Iterator[Outcome]":
    """As they end. If a compiler takes its process down, and so the pool, the checks that are left
    run in a process each, so that the one to blame is found.
    """
    from kernels_pallas.checks import Outcome, run_check

    left = list(chosen)
    with _pool(num_jobs) as pool:
        futures = {pool.submit(run_check, check): check for check in chosen}
        for future in as_completed(futures):
            if not isinstance(future.exception(), BrokenProcessPool):
                left.remove(futures[future])
                yield future.result()
    for check in left:
        with _pool(1) as pool:
            try:
                yield pool.submit(run_check, check).result()
            except BrokenProcessPool:
                detail = "its process died"
                yield Outcome(check=check, verdict="FAILED", seconds=0.0, detail=detail)


def _pool(num_jobs: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=32)


def _print(outcomes: "Sequence[Outcome]") -> None:
    """A line per subject; a column per target, in it the seconds or the verdict."""
    targets = list(dict.fromkeys(outcome.check.target for outcome in outcomes))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in outcomes:
        check = outcome.check
        sizes = " ".join(str(value) for value in check.sizes.values())
        kind = check.kind if check.kind == "compile" else f"{check.kind} {check.backend}"
        cell = f"{outcome.seconds:.1f} s" if outcome.verdict == "ok" else outcome.verdict
        found.setdefault((kind, f"{check.subject} {sizes}".strip()), {})[check.target] = cell
    table = Table("check", "subject", *targets, box=None)
    for (kind, subject), cells in sorted(found.items()):
        table.add_row(kind, subject, *[cells.get(target, "") for target in targets])
    Console().print(table)
