"""The command line: `paxserve run`, `paxserve demo`.

Owns: arguments, Hydra, progress bars, exit codes, and how errors read. In: argv. Out: tables,
files, 0, 1 (a run failed) or 2 (the command or its settings are wrong). Must not know: how a run
is made.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from paxserve import __version__
from paxserve.experiment import run
from paxserve.hydra_config import config_directory, custom_policies, read_config
from paxserve.results import new_run_dir, write_results
from paxserve.terminal import Terminal

MOST_REFUSALS_SHOWN = 3
USER_ERRORS = (ValueError, NotImplementedError, FileNotFoundError, ModuleNotFoundError)
EPILOG = """\
examples:
  paxserve run                                          the 48 demo prompts, default policies
  paxserve run batching=textbook limits.max_num_seqs=8  one policy and one limit changed
  paxserve run -m batching=static,chunked_prefill reservation=max placement=first_fit \\
      limits.max_model_len=1024                         a sweep
  paxserve run workload=jsonl workload.path=FILE.jsonl run_dir=DIR
  paxserve run batching=my_module:MyBatching            a policy of your own
  paxserve run --help                                   groups, choices and settings
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `paxserve` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="paxserve",
        description="Continuous batching and PagedAttention as separate, swappable policies.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paxserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("run", help="run an experiment: Hydra overrides follow", add_help=False)
    demo = commands.add_parser("demo", help="static against continuous batching, one table")
    demo.add_argument("--out", type=Path, default=None, help="directory for the results")
    if arguments[:1] == ["run"]:
        return run_command(arguments[1:])
    known = parser.parse_args(arguments)
    from paxserve.demo import demo as run_demo

    try:
        run_demo(known.out, terminal=Terminal())
    except USER_ERRORS as error:
        return _fail(error)
    return 0


def run_command(overrides: Sequence[str]) -> int:
    """`paxserve run`: one run, or with `-m` a sweep that goes on when one of its runs fails."""
    failures: list[str] = []

    def task(config: DictConfig) -> None:
        failure = run_job(config)
        if failure is not None:
            failures.append(failure)

    sys.argv = ["paxserve run", *custom_policies(overrides)]
    hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="config")(
        task
    )()
    for failure in failures if len(failures) > 1 else ():
        print(f"paxserve: failed: {failure}", file=sys.stderr)
    return 2 if failures else 0


def run_job(config: DictConfig) -> str | None:
    """One run of a command or sweep: results in its directory, its table on the terminal.

    Returns:
        None, or what was wrong; it has been printed, and is in `error.txt` of the directory.
    """
    from paxserve.report.table import print_table

    hydra_config = HydraConfig.get()
    plain, choices, explicit = read_config(config, hydra_config)
    terminal = Terminal()
    path = None
    try:
        path = new_run_dir(_run_dir(plain, hydra_config))
        result = run(
            plain, choices=choices, explicit=explicit, say=terminal.say, progress=terminal.progress
        )
    except USER_ERRORS as error:
        terminal.close()
        if path is not None:
            (path / "error.txt").write_text(f"{error}\n", encoding="utf-8")
        _fail(error)
        return str(error)
    terminal.close()
    write_results(result, path, config={"choices": choices, **plain})
    for arrival, why in result.refused[:MOST_REFUSALS_SHOWN]:
        terminal.say(f"request {arrival.request_id} was refused: {why}")
    if len(result.refused) > MOST_REFUSALS_SHOWN:
        terminal.say(f"... and {len(result.refused) - MOST_REFUSALS_SHOWN} more were refused")
    print_table({path.name: result.summary})
    print(f"results: {path}")
    return None if result.engine.requests else f"all requests of {path} were refused"


def _run_dir(plain: dict[str, Any], hydra_config: HydraConf) -> str | None:
    """`run_dir`, and under it one directory per run of a sweep."""
    wanted = plain.get("run_dir")
    if wanted is None or hydra_config.mode != RunMode.MULTIRUN:
        return wanted
    return str(Path(wanted) / str(hydra_config.job.num))


def _fail(error: Exception) -> int:
    print(f"paxserve: error: {error}", file=sys.stderr)
    return 2
