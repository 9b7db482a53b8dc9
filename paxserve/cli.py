"""The command line: `paxserve run`, `paxserve demo`, and commands that lie in files of their own.

Owns: arguments, Hydra, progress bars, exit codes, and how errors read. In: argv. Out: tables,
files, and 0, 1 (a run failed, or Hydra refused an override), 2 (wrong settings), 130 (interrupted),
141 (nobody reads on).
Must not know: how a run is made.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from paxserve import (
    __version__,
    capacity_command,
    check_kernels_command,
    pairs_command,
    replay_command,
    report_commands,
)
from paxserve.calibrate import command as calibrate_command
from paxserve.experiment import NothingCompleted, Run, errors_of, nothing_completed, run
from paxserve.fidelity import command as fidelity_command
from paxserve.files import write_text
from paxserve.hydra_config import (
    config_directory,
    custom_policies,
    read_config,
    search_override,
)
from paxserve.metrics import Summary
from paxserve.plan import command as plan_command
from paxserve.report.table import print_table
from paxserve.results import (
    FAILURE,
    check_writable,
    new_run_dir,
    write_results,
)
from paxserve.terminal import Terminal, while_read
from paxserve.tracking import TRACKER, Tracking
from paxserve.verify import command as verify_command

MOST_LOST_SHOWN = 3
USER_ERRORS = (ValueError, NotImplementedError, FileNotFoundError, ModuleNotFoundError)
EPILOG = """\
examples:
  paxserve run                                          the 48 demo prompts, default policies
  paxserve run batching=textbook limits.max_num_seqs=8  one policy and one limit changed
  paxserve run -m batching=static,chunked_prefill seed=0,1,2 n_jobs=2 run_dir=SWEEP \\
      limits.max_model_len=1024                         a sweep, each cell a process of its own
  paxserve run workload=jsonl workload.path=FILE.jsonl run_dir=DIR
  paxserve run batching=my_module:MyBatching            a policy of your own
  paxserve plot DIR ...                                 pictures of saved runs
  paxserve trace DIR                                    a timeline for ui.perfetto.dev
  paxserve claims --fast                                what the literature states, measured here
  paxserve buckets DIR --max-executables 6 --rerun      padded shapes that fit it better
  paxserve verify workload.limit=4 --quick              do policies change a token?
  paxserve pairs                                        which choices go together
  paxserve replay DIR admission=sjf                     the same requests, another policy
  paxserve check-kernels --quick                        TPU and GPU kernels without either
  paxserve plan model=llama-3-70b hardware=h100 tp=4    memory, batches, step times, limits
  paxserve capacity --slo p99_itl_ms=100 OVERRIDES      the highest rate that meets an SLO
  paxserve calibrate hardware=host-cpu --out FILE       what steps take on this device
  paxserve fidelity hardware=host-cpu --calibrate       real against simulated, same workload
  paxserve run --help                                   groups, choices and settings
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `paxserve` command."""
    return while_read(lambda: _act(list(sys.argv[1:] if argv is None else argv)))


def _act(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paxserve",
        description="Continuous batching and PagedAttention as separate, swappable policies.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paxserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("run", help="run an experiment: Hydra overrides follow", add_help=False)
    demo = commands.add_parser("demo", help="static against continuous batching, one table")
    demo.add_argument("--out", type=Path, default=None, help="directory for the results")
    demo.set_defaults(act=_demo)
    claims = commands.add_parser("claims", help="the literature's claims beside what runs here")
    claims.add_argument("--fast", action="store_true", help="smaller samples: under a minute")
    claims.add_argument("--json", type=Path, metavar="FILE", help="write them there, too")
    claims.add_argument("--data", type=Path, metavar="DIR", help="reference data, with traces/")
    claims.set_defaults(act=_claims)
    report_commands.add(commands)
    verify_command.add(commands)
    pairs_command.add(commands)
    replay_command.add(commands)
    check_kernels_command.add(commands)
    plan_command.add(commands)
    capacity_command.add(commands)
    calibrate_command.add(commands)
    fidelity_command.add(commands)
    if arguments[:1] == ["run"]:
        return run_command(arguments[1:])
    _find_own_modules()
    try:
        known = _parsed(parser, arguments)
        if known.command is None:
            parser.print_help()
            return 0
        return known.act(known) or 0
    except USER_ERRORS as error:
        _note_failure(error, None)
        return 2
    except KeyboardInterrupt:
        print("paxserve: interrupted", file=sys.stderr)
        return 130


def _parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Overrides may stand between options, which argparse alone does not take."""
    known, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(known, "overrides") or any(o.startswith("-") for o in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        known.overrides = [*known.overrides, *rest]
    if getattr(known, "config_dir", None) is not None:
        known.overrides = [search_override(known.config_dir), *known.overrides]
    return known


def _demo(arguments: argparse.Namespace) -> None:
    from paxserve.demo import demo

    demo(arguments.out, terminal=Terminal())


def _claims(arguments: argparse.Namespace) -> None:
    """Ends with 0 whatever holds: the table is the answer."""
    from paxserve.claims import Scale
    from paxserve.claims.runner import derive
    from paxserve.claims.table import print_claims

    data, file = arguments.data or os.environ.get("PAXSERVE_DATA"), arguments.json
    if arguments.data is not None and not arguments.data.is_dir():
        raise FileNotFoundError(f"--data {arguments.data} is not a directory")
    if file is not None:
        check_writable("--json", file)
    terminal = Terminal()
    scale = Scale(fast=arguments.fast, data=None if data is None else Path(data))
    claims = derive(scale, progress=terminal.progress)
    terminal.close()
    print_claims(claims)
    if file is not None:
        write_text(file, json.dumps([claim.to_json() for claim in claims], indent=1) + "\n")


def run_command(overrides: Sequence[str], *, into: Path | None = None) -> int:
    """`paxserve run`: one run, or with `-m` a sweep that goes on when one of its runs fails.

    Args:
        overrides: of Hydra.
        into: where the files go in place of run_dir, which is only written down.
    """
    failures: list[Exception] = []
    summaries: dict[str, Summary] = {}

    def task(config: DictConfig) -> None:
        done = run_job(config, into=into)
        if isinstance(done, Exception):
            failures.append(done)
        else:
            summaries[HydraConfig.get().job.override_dirname or "run"] = done

    _find_own_modules()
    main = hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="config")
    try:
        with TemporaryDirectory(prefix="paxserve-") as scratch:
            sys.argv = ["paxserve run", *custom_policies(overrides, scratch=scratch)]
            main(task)()
    except KeyboardInterrupt:
        print("paxserve: interrupted", file=sys.stderr)
        return 130
    if len(summaries) > 1:
        print_table(summaries)
    if len(failures) > 1:
        print(f"paxserve: {len(failures)} runs failed; see above", file=sys.stderr)
    return max((_exit_code(failure) for failure in failures), default=0)


def _find_own_modules() -> None:
    """For a policy of your own: batching=my_module:MyBatching."""
    sys.path.insert(0, os.getcwd())


def run_job(config: DictConfig, *, into: Path | None = None) -> Summary | Exception:
    """One run of a command or sweep: results in its directory, its table on the terminal.

    Args:
        config: as composed.
        into: see `run_command`.

    Returns:
        The summary, or what went wrong. That has been printed in a line, and is in `error.txt` of
        the directory, with its traceback.
    """
    hydra_config = HydraConfig.get()
    terminal = Terminal()
    path = tracking = None
    try:
        plain, choices, explicit = read_config(config, hydra_config)
        path = new_run_dir(str(into) if into is not None else _run_dir(plain, hydra_config))
        asked = {"choices": choices, **plain}
        tracking = Tracking.of(asked, path)
        result = run(
            plain,
            choices=choices,
            explicit=[key for key in explicit if key.partition(".")[0] not in (TRACKER, "run_dir")],
            say=terminal.say,
            progress=terminal.progress,
            tracking=tracking,
        )
        tracking.end(result.summary)
        _write(result, path, asked)
        return _show(result, path, terminal)
    except Exception as error:
        _note_failure(error, path)
        return error
    except KeyboardInterrupt:
        if path is not None:
            write_text(path / FAILURE, "interrupted\n")
        raise
    finally:
        terminal.close()
        if tracking is not None:
            tracking.end(None)


def _write(result: Run, path: Path, config: dict[str, Any]) -> None:
    """A run in which nothing was completed has failed, and that is written before the marker."""
    if (nothing := nothing_completed(result)) is not None:
        write_text(path / FAILURE, f"{nothing}\n")
    try:
        write_results(result, path, config=config)
    except Exception as error:  # nothing about it is the user's mistake
        raise RuntimeError(f"the results could not be written: {error}") from error


def _show(result: Run, path: Path, terminal: Terminal) -> Summary | Exception:
    terminal.close()
    lost = [f"request {arrival.request_id} was refused: {why}" for arrival, why in result.refused]
    lost += errors_of(result.engine)
    for message in lost[:MOST_LOST_SHOWN]:
        terminal.say(message)
    num_more = len(result.refused) + int(result.summary["failed"] or 0) - MOST_LOST_SHOWN
    if num_more > 0:
        kept = "requests.parquet" if result.engine.folded else "outputs.jsonl"
        terminal.say(f"... and {num_more} more; see {kept}")
    print_table({path.name: result.summary})
    print(f"results: {path}")
    if (nothing := nothing_completed(result)) is None:
        return result.summary
    _note_failure(nothing, path)
    return nothing


def _note_failure(error: Exception, path: Path | None) -> None:
    is_users = isinstance(error, (*USER_ERRORS, NothingCompleted))
    what = f"{error}" if is_users else f"{type(error).__name__}: {error}"
    if path is not None:
        write_text(path / FAILURE, "".join([f"{what}\n\n", *traceback.format_exception(error)]))
    where = "" if is_users or path is None else f" (traceback in {path / FAILURE})"
    print(f"paxserve: error: {what}{where}", file=sys.stderr)


def _exit_code(error: Exception) -> int:
    return 2 if isinstance(error, USER_ERRORS) else 1


def _run_dir(plain: dict[str, Any], hydra_config: HydraConf) -> str | None:
    """`run_dir`, and under it one directory per run of a sweep."""
    wanted = plain.get("run_dir")
    if wanted is None or hydra_config.mode != RunMode.MULTIRUN:
        return wanted
    return str(Path(wanted) / str(hydra_config.job.num))
