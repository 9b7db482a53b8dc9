"""The requests of a saved run once more, under its own policies and under others.

Owns: the settings of the two servings. In: a run directory and overrides. Out: a `Replay`, and its
files. Must not know: how differences are summed up (`paired.py`).

Both servings get the recorded arrivals with the same forced output lengths, on the same executor:
they differ in what the overrides change, and in nothing else. A request of several sequences ends
all of them at the length of the longest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paxserve import experiment
from paxserve.compose import GATE
from paxserve.experiment import Progress, Run
from paxserve.hydra_config import Composed, compose_config, key_of, rewritten
from paxserve.metrics import request_record
from paxserve.notices import Say
from paxserve.paired import Paired, PairedRecord, paired_records, summarize_pairs
from paxserve.recorded import read_arrivals, with_forced_length
from paxserve.report.run_tables import RunTables
from paxserve.results import new_run_dir, write_results, write_table
from paxserve.workload import Arrival, Source, Vocabulary
from paxserve.workload.sources.listed import Listed

OWN, OTHER = "own", "other"
_NOT_REPLAYED = ("workload", "experiment", "run")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A workload that was written down; closed loops too arrive as they did then."""

    arrivals: tuple[Arrival, ...]
    forces_lengths = True

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        return Listed(self.arrivals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Two servings, `first` under the run's own settings, and their differences."""

    first: Run
    second: Run
    records: list[PairedRecord]
    figures: dict[str, Paired]
    path: Path


def replay(
    run: RunTables,
    overrides: Sequence[str],
    *,
    out: Path | None,
    say: Say,
    progress: Progress,
) -> Replay:
    """Serve twice, compare, and write both runs and `paired.parquet` into a new directory.

    Args:
        run: recorded with `arrivals.jsonl`.
        overrides: as of `paxserve run`; those of the executor, and
            where configs are looked for, hold for both servings, and so does
            a policy of a user's own that the run had and that is named again.
        out: the directory; default: a new one under runs/.
        say, progress: as of `experiment.run`.

    Raises:
        ValueError: overrides as of `experiment.run`; no arrivals; or a policy of a user's own,
            whose code is not imported from a run directory.
    """
    arrivals = tuple(with_forced_length(arrival) for arrival in read_arrivals(run.path))
    if not arrivals:
        raise ValueError(f"{run.path} has no request that ended well: there is nothing to replay")
    named_again = {f"{group}={name}" for group, name in run.config.get("choices", {}).items()}
    of_both = [o for o in overrides if o in named_again or _is_of_executor(o)]
    path = new_run_dir(None if out is None else str(out))
    settings = {
        name: settings_of(run, asked, arrivals)
        for name, asked in ((OWN, of_both), (OTHER, overrides))
    }
    _check(settings[OTHER], arrivals)  # before its own serving, which may take long
    served = []
    for name, (config, choices, explicit) in settings.items():
        say(f"replay of {len(arrivals)} requests under {name} policies")
        done = experiment.run(
            config, choices=choices, explicit=explicit, say=say, progress=progress,
            workload=Recorded(arrivals),
        )  # fmt: skip
        said = {**config, "workload": {"recorded": str(run.path)}}
        write_results(done, new_run_dir(str(path / name)), config={"choices": choices, **said})
        served.append(done)
    first, second = served
    records = paired_records(
        map(request_record, first.engine.requests), map(request_record, second.engine.requests)
    )
    write_table(path / "paired.parquet", PairedRecord, [record._asdict() for record in records])
    seed = int(run.config.get("seed", 0))
    figures = summarize_pairs(records, seed=seed)
    return Replay(first=first, second=second, records=records, figures=figures, path=path)


def _check(settings: Composed, arrivals: tuple[Arrival, ...]) -> None:
    """Build what would serve, and let it go: two engines would not find room on a device."""
    config, choices, explicit = settings
    experiment.prepare(
        config,
        choices=choices,
        explicit=explicit,
        say=lambda message: None,
        workload=Recorded(arrivals),
    )


def settings_of(run: RunTables, overrides: Sequence[str], arrivals: Sequence[Arrival]) -> Composed:
    """The run's settings with overrides in their place."""
    recorded: dict[str, str] = dict(run.config.get("choices", {}))
    asked = {key_of(override) for override in (*overrides, *rewritten(overrides))}
    kept = {
        group: choice
        for group, choice in recorded.items()
        if group not in asked and group.split("/")[0] not in _NOT_REPLAYED
    }
    _check_own(run, kept)
    config, choices, explicit = compose_config([*_as_overrides(kept), *overrides])
    if config.get("record") == "compact":
        raise ValueError("record=compact keeps no requests, and a replay compares them one by one")
    for group, values in run.config.items():
        if isinstance(values, dict) and _is_same(group, recorded, choices):
            kept_values = {k: v for k, v in values.items() if f"{group}.{k}" not in asked}
            config[group] = {**(config.get(group) or {}), **kept_values}
    if "seed" not in asked:
        config["seed"] = run.config.get("seed", 0)
    _force(config)
    if choices["executor"] == "scripted":
        _fit_scripted(config, run, arrivals)
    choices = {g: c for g, c in choices.items() if g.split("/")[0] not in _NOT_REPLAYED}
    choices["workload"] = "recorded"
    return config, choices, [key for key in explicit if key in asked]


def _is_of_executor(override: str) -> bool:
    return key_of(override).split(".")[0] in ("executor", "kernel", "model", "hydra")


def _check_own(run: RunTables, kept: Mapping[str, str]) -> None:
    foreign = [group for group, choice in kept.items() if ":" in choice or "(" in choice]
    if not kept or foreign:
        raise ValueError(
            f"{run.path} cannot be replayed from its config: {', '.join(foreign) or 'choices'} is "
            "not one of the project's own; name it again among the overrides"
        )


def _as_overrides(kept: Mapping[str, str]) -> list[str]:
    """Gates are a list, the others a choice each."""
    return [f"{g}=[{choice}]" if g == GATE else f"{g}={choice}" for g, choice in kept.items()]


def _is_same(group: str, recorded: Mapping[str, str], choices: Mapping[str, str]) -> bool:
    is_choice = group in recorded and group not in _NOT_REPLAYED
    return is_choice and recorded[group] == choices.get(group)


def _force(config: dict[str, Any]) -> None:
    """Nothing ends an output but its length."""
    for key in ("stop", "stop_token_ids"):
        if key in config["sampling"]:
            config["sampling"][key] = []


def _fit_scripted(config: dict[str, Any], run: RunTables, arrivals: Sequence[Arrival]) -> None:
    """What a model or its device decided when the run was recorded."""
    limits, executor = config["limits"], config["executor"]
    for key, applied in (("max_model_len", "max_model_len"), ("num_blocks_override", "num_blocks"),
                         ("max_num_batched_tokens", "max_num_batched_tokens")):  # fmt: skip
        if limits.get(key) is None:
            limits[key] = run.limit(applied)
    largest = max(max(arrival.prompt_token_ids or (0,)) for arrival in arrivals)
    executor["vocab_size"] = max(executor["vocab_size"], largest + 1)
