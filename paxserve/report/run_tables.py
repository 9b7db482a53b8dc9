"""The saved tables of one run, as data frames.

Owns: how a run directory is read, and how a run is named in pictures. In: a directory that
`results.py` wrote. Out: `RunTables`. Must not know: the engine; whatever a picture needs is in the
files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from paxserve.results import MARKER

SLOTS = "slots_"
_ALWAYS_NAMED = ("batching", "reservation", "placement")
_NAMED_IF_UNUSUAL = {
    "admission": "fcfs",
    "gate": "",
    "prefix_cache": "none",
    "eviction": "lru",
    "victim": "newest",
    "preemption": "recompute",
}


_COMPACT = "the run was made with record=compact; run it again with record=full"
_OLD = "the run is of a version that did not record it; run it again"


class MissingData(ValueError):
    """A run directory lacks what was asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """Everything saved of one run.

    `requests`, `steps`, `decisions` and `blocks` have the columns of their files; the last two are
    None where the run did not record them. `config` is what was asked for, `engine` what was
    applied.
    """

    path: Path
    name: str
    summary: Mapping[str, Any]
    requests: pd.DataFrame
    steps: pd.DataFrame
    decisions: pd.DataFrame | None
    blocks: pd.DataFrame | None
    config: Mapping[str, Any]
    engine: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | Path, *, name: str | None = None) -> "RunTables":
        """Read a finished run.

        Args:
            path: its directory.
            name: what pictures call it; default: the name of the directory.

        Raises:
            MissingData: no such directory, or the run did not finish.
        """
        directory = Path(path)
        if not (directory / MARKER).is_file():
            raise MissingData(
                f"{directory} holds no finished run (no file {MARKER!r}): name a directory that "
                "paxserve run has written to its end"
            )
        return cls(
            path=directory,
            name=name or directory.resolve().name,
            summary=_json(directory / "summary.json"),
            requests=_table(directory / "requests.parquet"),
            steps=_table(directory / "steps.parquet"),
            decisions=_optional_table(directory / "decisions.parquet"),
            blocks=_optional_table(directory / "blocks.parquet"),
            config=_yaml(directory / "config.yaml"),
            engine=_json(directory / "engine.json"),
        )

    @property
    def ledger(self) -> pd.DataFrame:
        """Slots per class for every step, beside its number and times."""
        need(self.steps, "step_id", "start_s", "duration_s", what=self._where("steps"))
        classes = [column for column in self.steps if column.startswith(SLOTS)]
        kept = self.steps[["step_id", "start_s", "duration_s", *classes]]
        return kept.rename(columns={column: column.removeprefix(SLOTS) for column in classes})

    @property
    def origin_s(self) -> float:
        """The first arrival on the run's clock: time 0 of every picture."""
        return float(self.requests["arrival_s"].min()) if len(self.requests) else 0.0

    @property
    def end_s(self) -> float:
        """The end of the last step, since the first arrival."""
        if not len(self.steps):
            return 0.0
        last = self.steps.iloc[-1]
        return float(last["start_s"] + last["duration_s"]) - self.origin_s

    @property
    def policies(self) -> dict[str, str]:
        """The choice of each policy axis that says something: the unusual ones, and three always.

        A policy of a user's own goes by its class.
        """
        choices = self.config.get("choices", {})
        named = {axis: choices[axis] for axis in _ALWAYS_NAMED if axis in choices}
        named |= {
            axis: choices[axis]
            for axis, usual in _NAMED_IF_UNUSUAL.items()
            if choices.get(axis, usual) != usual
        }
        return {axis: _short(choice) for axis, choice in named.items()}

    @property
    def title(self) -> str:
        """The run and its policies, for a picture's title."""
        return f"{self.name}  ({', '.join(self.policies.values()) or 'policies not recorded'})"

    def limit(self, name: str) -> int:
        """A limit the run was held to, such as `max_num_seqs`.

        Raises:
            MissingData: neither engine.json nor config.yaml has it.
        """
        for limits in (self.engine.get("limits", {}), self.config.get("limits", {})):
            if limits.get(name) is not None:
                return int(limits[name])
        raise MissingData(f"{self.path} does not say {name}: engine.json has no limits.{name}")

    def need(self, table: str, *columns: str) -> pd.DataFrame:
        """A table that surely has these columns.

        Raises:
            MissingData: it was not recorded, or lacks one of them.
        """
        found = getattr(self, table)
        is_compact = self.config.get("record") == "compact"
        if found is None:
            why = _COMPACT if is_compact else "the run did not record it"
            raise MissingData(f"{self._where(table)} does not exist: {why}")
        why = _COMPACT if is_compact else _OLD
        return need(found, *columns, what=self._where(table), why=why)

    def _where(self, table: str) -> Path:
        return self.path / f"{table}.parquet"


def need(
    frame: pd.DataFrame,
    *columns: str,
    what: object,
    why: str = _OLD,
) -> pd.DataFrame:
    """The frame, if it has these columns.

    Raises:
        MissingData: it lacks one; `what` names the table, `why` says what to do.
    """
    missing = [column for column in columns if column not in frame]
    if missing:
        raise MissingData(f"{what} has no column {', '.join(missing)}: {why}")
    return frame


def labels(runs: Sequence[RunTables]) -> list[str]:
    """Names that tell runs apart, with the policies that not all of them have."""
    shared = set.intersection(*(set(run.policies.items()) for run in runs)) if runs else set()
    differing = [
        ", ".join(choice for axis, choice in run.policies.items() if (axis, choice) not in shared)
        for run in runs
    ]
    return [
        f"{run.name} ({policies})" if policies else run.name
        for run, policies in zip(runs, differing, strict=True)
    ]


def _short(choice: str) -> str:
    """`MyPolicy` of `MyPolicy(k=3)` and of `my_module:MyPolicy`; several are joined by a plus."""
    return "+".join(one.rsplit(":", 1)[-1] for one in str(choice).split("(")[0].split(","))


def _table(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise MissingData(f"{path} does not exist: the run directory is not whole")
    return pd.read_parquet(path)


def _optional_table(path: Path) -> pd.DataFrame | None:
    return pd.read_parquet(path) if path.is_file() else None


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return dict(found)
