"""The literature's claims, derived again by running this code on a virtual clock.

A `Row` is what a paper states, a `Claim` what came out beside it. Nothing here is a constant that
stands for a result: every measured figure comes from an engine that served requests, or (D) from
the plan of one. Rows that need a hardware model run on the virtual clock of the simulated executor
(`simulation.py`); what they rest on stands in their notes.

| file | rows |
|---|---|
| `batching.py` | A1-A4 |
| `stall.py`, `orca.py` | A5, A6 |
| `intensity.py` | A7 |
| `memory.py` | B1-B3, B9 |
| `churn.py` | B4 |
| `overload.py`, `batched.py` | B5-B7, B6 with Alpaca |
| `figure12.py` | B8 |
| `preemption.py` | B10 |
| `sharing.py` | C1-C3 |
| `beams.py` | C4 |
| `sizing.py` | D1-D5 |
| `flags.py` | D6 |
| `gathering.py`, `paging.py` | E1, E2 |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

type Value = float | str | Sequence[float]
type Values = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row with what was measured. `holds` is None where it could not be run; `note` says why
    not, why it does not hold, or what was assumed.
    """

    id: str
    claim: str
    stated: Values
    measured: Values
    tolerance: str
    holds: bool | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The six fields of the exchange format; a note goes with what was measured."""
        note = {"note": self.note} if self.note else {}
        return {
            "id": self.id,
            "claim": self.claim,
            "stated": dict(self.stated),
            "measured": {**self.measured, **note},
            "tolerance": self.tolerance,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """What is stated, by whom it is measured left open."""

    id: str
    claim: str
    stated: Values
    tolerance: str = "exact"

    def measured(self, values: Values, *, holds: bool | None = None, note: str = "") -> Claim:
        """The claim; without `holds`, what was measured must be what is stated, and no more."""
        if holds is None:
            holds = dict(values) == dict(self.stated)
        return self._claim(values, holds, note)

    def failed(self, error: Exception) -> Claim:
        """The run broke off: whatever was claimed does not hold of this code."""
        return self._claim({}, False, f"the run failed: {type(error).__name__}: {error}")

    def not_run(self, why: str) -> Claim:
        """Something that the run needs is not here."""
        return self._claim({}, None, f"not run: {why}")

    def _claim(self, values: Values, holds: bool | None, note: str) -> Claim:
        return Claim(
            id=self.id,
            claim=self.claim,
            stated=self.stated,
            measured=values,
            tolerance=self.tolerance,
            holds=holds,
            note=note,
        )


class Missing(Exception):
    """A data set or a model that a row needs is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is run. `fast`: smaller samples. `data`: the folder that has `traces/`."""

    fast: bool = False
    data: Path | None = None

    def of(self, full: int, fast: int) -> int:
        """A sample's size."""
        return fast if self.fast else full

    def trace(self, name: str) -> str:
        """Path of a file under `traces/`.

        Raises:
            Missing: it is not there.
        """
        path = None if self.data is None else self.data / "traces" / name
        if path is None or not path.is_file():
            raise Missing(f"needs traces/{name} (set PAXSERVE_DATA, or give --data DIR)")
        return str(path)


def within(measured: float, stated: float, *, share: float) -> bool:
    """Whether a figure lies within a share of what is stated."""
    return abs(measured - stated) <= share * stated
