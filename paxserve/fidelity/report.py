"""A trial as a table and as JSON.

Owns: what is said of it. In: a `Trial`. Out: text, plain data. Must not know: how it was held.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paxserve.results import environment
from paxserve.terminal import table_console

if TYPE_CHECKING:
    from paxserve.fidelity.bench import Bench
    from paxserve.fidelity.trial import Trial
    from paxserve.step_profile import Profile


def print_trial(trial: "Trial", *, console: Console | None = None) -> None:
    """A line per figure, and what the retold run came to."""
    title = f"medians of {len(trial.real)} real and {len(trial.simulated)} simulated runs"
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "real", "simulated", "error", "spread", "allowed", "holds"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for one in trial.compared:
        table.add_row(
            one.name,
            *[f"{median:.4g}" for median in one.medians],
            f"{one.error:+.1%}",
            f"{one.spread:.1%}",
            f"{one.allowed:.1%}",
            "yes" if one.holds else "NO",
        )
    (console or table_console()).print(table)
    if trial.capacity is not None:
        print(f"capacity, all there at once: {trial.capacity:.3g} requests/s")
    told = trial.retold
    figures = "every figure equal"
    if told.worst_error:
        figures = f"{told.worst_figure} differs by {told.worst_error:.1e}"
    print(
        f"told every reading of the last real run's clock again: "
        f"{told.num_decisions - told.num_different} of {told.num_decisions} decisions equal, "
        f"{figures}"
    )
    errors = ", ".join(f"{name} {error:+.2%}" for name, error in trial.timed.items())
    print(f"told only its step times and the host's gaps, on a virtual clock: {errors}")


def as_data(trial: "Trial", profiles: Sequence["Profile"], bench: "Bench") -> dict[str, Any]:
    """Everything, plain."""
    return {
        "holds": trial.holds,
        "capacity_requests_per_s": trial.capacity,
        "figures": [
            {
                **asdict(one),
                "error": one.error,
                "spread": one.spread,
                "allowed": one.allowed,
                "holds": one.holds,
            }
            for one in trial.compared
        ],
        "retold": {
            **asdict(trial.retold),
            "first_difference": repr(trial.retold.first_difference),
            "is_equal": trial.retold.is_equal,
        },
        "timed": dict(trial.timed),
        "real": trial.real,
        "simulated": trial.simulated,
        "profiles": [profile.to_json() for profile in profiles],
        "environment": environment(bench.prepared.made.device),
    }
