"""`paxserve buckets`: better padded shapes for a recorded run, and the run again with them.

Owns: what of a saved run the search is asked about, the table, and the second run. In: saved
tables. Out: a `Study`, and the directory of the second run. Must not know: how the search works
(`bucket_plan.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paxserve import experiment
from paxserve.bucket_plan import BucketPlan, Padding, best_buckets, padding
from paxserve.device.buckets import Bucket, Buckets
from paxserve.limits import Limits
from paxserve.report.run_tables import MissingData, RunTables
from paxserve.results import new_run_dir, write_results
from paxserve.terminal import Terminal, table_console


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A run's own ladder and the proposed one, and what each adds to the run's steps.

    `recorded` follows from the run's own shapes; a run that was not padded is held to the default
    ladder of its limits.
    """

    limits: Limits
    row_weight: float
    own: Buckets
    recorded: Padding
    plan: BucketPlan
    predicted: Padding


def study(run: RunTables, *, max_shapes: int, row_weight: float) -> Study:
    """Propose a ladder for a run.

    Raises:
        MissingData: the run has no steps, or did not record its limits.
        ValueError: too few shapes.
    """
    steps = run.need("steps", "num_tokens", "num_rows")
    if not len(steps):
        raise MissingData(f"{run.path} has no step to learn from")
    tokens, rows = steps["num_tokens"].to_numpy(), steps["num_rows"].to_numpy()
    limits = Limits(**{field.name: run.limit(field.name) for field in fields(Limits)})
    own = _own_buckets(run, limits)
    plan = best_buckets(tokens, rows, limits=limits, max_shapes=max_shapes, row_weight=row_weight)
    return Study(
        limits=limits,
        row_weight=row_weight,
        own=own,
        recorded=padding(own, tokens, rows),
        plan=plan,
        predicted=padding(plan.buckets(limits), tokens, rows),
    )


def measured(run: RunTables) -> Padding:
    """What padding really added to a run's steps."""
    columns = ("padded_tokens", "padded_rows", "num_tokens", "num_rows")
    steps = run.need("steps", *columns)
    return Padding(**{column: int(steps[column].sum()) for column in columns})


def overrides(plan: BucketPlan) -> dict[str, tuple[int, ...]]:
    """The proposal as settings."""
    return {
        "limits.row_buckets": plan.row_buckets,
        "limits.token_buckets": plan.token_buckets,
    }


def run_again(run: RunTables, plan: BucketPlan, *, out: Path | None, terminal: Terminal) -> Path:
    """The same configuration with the proposed ladder; returns the directory of its results.

    Raises:
        ValueError: the run had a policy of a user's own, whose code is not imported from a run
            directory, or its executor does not pad.
    """
    choices: Mapping[str, str] = run.config.get("choices", {})
    foreign = [axis for axis, choice in choices.items() if ":" in choice or "(" in choice]
    if not choices or foreign:
        raise ValueError(
            f"{run.path} cannot be run again from its config: {', '.join(foreign) or 'choices'} "
            "is not one of the project's own; run it yourself with the overrides above"
        )
    if choices.get("executor") == "scripted":
        raise ValueError(
            f"{run.path} ran without a model, which pads nothing: measure the proposal on a run "
            "with executor=real"
        )
    config = {key: value for key, value in run.config.items() if key != "choices"}
    ladder = {key.removeprefix("limits."): list(value) for key, value in overrides(plan).items()}
    config["limits"] = {**config["limits"], **ladder}
    path = new_run_dir(None if out is None else str(out))
    done = experiment.run(
        config,
        choices=choices,
        explicit=list(overrides(plan)),
        say=terminal.say,
        progress=terminal.progress,
    )
    write_results(done, path, config={"choices": choices, **config})
    return path


def print_study(found: Study, second: Padding | None, *, console: Console | None = None) -> None:
    """One column per ladder, and one for what the second run measured."""
    table = Table(title="padded shapes (tokens x rows)", title_justify="left")
    for heading in ("", "this run's", "proposed"):
        table.add_column(heading, justify="left" if not heading else "right")
    columns = [found.recorded, found.predicted]
    shapes = [found.own.shapes, found.plan.buckets(found.limits).shapes]
    if second is not None:
        table.add_column("proposed, run again", justify="right")
        columns.append(second)
        shapes.append(shapes[-1])
    table.add_row("shapes", *[_shapes(one) for one in shapes])
    table.add_row("executables per kind of sampling", *[str(len(one)) for one in shapes])
    table.add_row("padded share of tokens", *[f"{one.token_share:.1%}" for one in columns])
    table.add_row("padded share of rows", *[f"{one.row_share:.1%}" for one in columns])
    cost = f"cost: padding tokens + {found.row_weight:g} x padding rows"
    table.add_row(cost, *[f"{one.cost(found.row_weight):.0f}" for one in columns])
    (console or table_console()).print(table)
    for key, value in overrides(found.plan).items():
        print(f"{key}=[{','.join(map(str, value))}]")


def _own_buckets(run: RunTables, limits: Limits) -> Buckets:
    shapes = run.engine.get("buckets")
    if shapes is None:
        return Buckets.for_limits(limits)
    return Buckets(tuple(Bucket(*shape) for shape in shapes))


def _shapes(shapes: tuple[Bucket, ...]) -> str:
    return "\n".join(f"{bucket.num_tokens} x {bucket.num_rows}" for bucket in shapes)
