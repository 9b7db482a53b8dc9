"""Commands that look at saved runs: `paxserve plot`, `paxserve trace`, `paxserve buckets`.

Owns: their arguments and what they print. In: run directories. Out: files beside them. Must not
know: how anything is drawn or found; pandas and matplotlib are imported when a command needs them.
"""

import argparse
from pathlib import Path

from paxserve.terminal import Terminal


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `act`, called with the arguments."""
    plot = commands.add_parser("plot", help="pictures of saved runs, all of them in each")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    plot.add_argument("--out", type=Path, help="directory; default: the run's own, or the common")
    plot.add_argument("--only", action="append", default=[], metavar="NAME", help=_PICTURES)
    plot.set_defaults(act=_plot)
    trace = commands.add_parser("trace", help="a saved run as a timeline for ui.perfetto.dev")
    trace.add_argument("run", type=Path, metavar="RUN_DIR")
    trace.add_argument("--out", type=Path, help="file; default: trace.json.gz in the run directory")
    trace.set_defaults(act=_trace)
    buckets = commands.add_parser("buckets", help="padded shapes that fit a saved run better")
    buckets.add_argument("run", type=Path, metavar="RUN_DIR")
    buckets.add_argument("--max-executables", type=int, required=True, metavar="N", help=_MOST)
    buckets.add_argument("--row-weight", type=float, default=1.0, metavar="W", help=_WEIGHT)
    buckets.add_argument("--rerun", action="store_true", help="run it again with the proposal")
    buckets.add_argument("--out", type=Path, help="directory of the second run; default: a new one")
    buckets.set_defaults(act=_buckets)


_PICTURES = "timeline, blocks, memory, kv, latency or throughput; may be given again"
_MOST = "most shapes, each one executable per kind of sampling (greedy, random, log-probabilities)"
_WEIGHT = "what a row of padding costs, in tokens of padding; default: 1"


def _plot(arguments: argparse.Namespace) -> None:
    from paxserve.report.pictures import plot
    from paxserve.report.run_tables import RunTables

    runs = [RunTables.read(path) for path in arguments.runs]
    for written in plot(runs, out=arguments.out, only=arguments.only):
        print(written)


def _trace(arguments: argparse.Namespace) -> None:
    from paxserve.report.perfetto import write_trace
    from paxserve.report.run_tables import RunTables

    path = arguments.out or arguments.run / "trace.json.gz"
    num_events = write_trace(RunTables.read(arguments.run), path)
    print(f"{path}: {num_events} events; open it at https://ui.perfetto.dev")


def _buckets(arguments: argparse.Namespace) -> None:
    from paxserve.bucket_study import measured, print_study, run_again, study
    from paxserve.report.run_tables import RunTables

    run = RunTables.read(arguments.run)
    found = study(run, max_shapes=arguments.max_executables, row_weight=arguments.row_weight)
    if not arguments.rerun:
        print_study(found, None)
        return
    path = run_again(run, found.plan, out=arguments.out, terminal=Terminal())
    print_study(found, measured(RunTables.read(path)))
    print(f"results: {path}")
