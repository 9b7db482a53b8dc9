"""`paxserve demo`: the same 48 prompts and the same KV memory, served twice.

Owns: which two experiments are compared, and what is shown of them. In: an output directory. Out:
one table, one picture, a few texts, and the result files of both runs.
"""

from pathlib import Path

from paxserve.experiment import Run, run
from paxserve.files import write_text
from paxserve.hydra_config import compose_config
from paxserve.report.run_tables import RunTables
from paxserve.report.table import print_table
from paxserve.report.timeline import draw_timelines
from paxserve.results import new_run_dir, write_results
from paxserve.terminal import Terminal

RUNS = {
    "static, contiguous max": "demo_static",
    "continuous, paged": "demo_continuous",
}
NUM_TEXTS = 6


def demo(out: Path | None, *, terminal: Terminal) -> None:
    """Run it.

    Args:
        out: directory for the results; None makes a new one under runs/.

    Raises:
        ValueError: `out` holds something already.
        ModuleNotFoundError: the small model is not installed; the message says how.
    """
    path = new_run_dir(None if out is None else str(out))
    runs = {}
    for name, experiment in RUNS.items():
        terminal.say(f"{name}: experiment={experiment}")
        runs[name] = _run(experiment, path / experiment, terminal)
    picture, texts = path / "timeline.png", path / "texts.md"
    saved = [RunTables.read(path / RUNS[name], name=name) for name in runs]
    draw_timelines(saved).save(picture)
    write_text(texts, _texts(next(reversed(runs.values()))))
    print_table({name: done.summary for name, done in runs.items()})
    for name, done in runs.items():
        print(f"{name}: {done.num_executables} executables, warm-up {done.warm_up_s:.1f} s")
    print(f"same tokens in both runs: {_num_same(*runs.values())}")
    print(f"row timeline: {picture}\ntexts: {texts}\nresult files: {path}")


def _run(experiment: str, path: Path, terminal: Terminal) -> Run:
    plain, choices, explicit = compose_config([f"experiment={experiment}"])
    done = run(
        plain, choices=choices, explicit=explicit, say=terminal.say, progress=terminal.progress
    )
    write_results(done, new_run_dir(str(path)), config={"choices": choices, **plain})
    return done


def _texts(done: Run) -> str:
    """Some answers, as Markdown."""
    lines = ["# Some of the texts\n"]
    for request in done.engine.requests[:: max(1, len(done.engine.requests) // NUM_TEXTS)]:
        output = done.engine.output(request).outputs[0]
        lines.append(f"## {request.request_id} ({output.finish_reason})\n\n{output.text.strip()}\n")
    return "\n".join(lines)


def _num_same(first: Run, second: Run) -> str:
    """How many requests have equal tokens in both runs."""
    ours = {r.request_id: list(r.output_token_ids) for r in first.engine.requests}
    theirs = {r.request_id: list(r.output_token_ids) for r in second.engine.requests}
    return f"{sum(ours[name] == theirs.get(name) for name in ours)} of {len(ours)} requests"
