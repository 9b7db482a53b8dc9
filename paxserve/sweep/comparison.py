"""What a sweep says of its policies, over its seeds.

Owns: how cells are grouped, and how sure a mean is. Pure. In: the table of a sweep. Out: tidy
tables. Must not know: files, pictures.

A sweep has axes. One is the seed, over which means are taken; one may be numeric and is what
figures are drawn against (`by`); what sets cells apart beside these is called their policy,
whatever it is. A number that is null in some cell has no place on an axis, so it is a policy, too.
Beside a mean over seeds stand the ends of its 95 % bootstrap interval; of fewer than five seeds,
whose resamples say little, the smallest and the largest value; of one, nothing.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from paxserve.paired import mean_interval
from paxserve.sweep.table import CELL, STATE, axes_in

SEED = "seed"
METRICS = (
    "mean_normalized_latency_s_per_token", "output_throughput", "p99_ttft_ms", "p99_itl_ms",
)  # fmt: skip

FEWEST_OF_AN_INTERVAL = 5
INTERVAL = "95 % bootstrap interval of the mean"

type Policy = tuple[Any, ...]


class Mean(NamedTuple):
    """One figure of one policy at one place of `by`, over seeds."""

    policy: str
    by: float | None
    metric: str
    num_seeds: int
    mean: float
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """The same of a policy's figure less the baseline's with the same seed."""

    policy: str
    baseline: str
    by: float | None
    metric: str
    num_seeds: int
    mean: float
    low: float | None
    high: float | None
    share_lower: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Cells that have figures, of `num_cells` that were asked for; `by` is a numeric axis or None,
    `policy_axes` are the others. A numeric axis of which one value is left is neither.
    """

    cells: pd.DataFrame
    num_cells: int
    by: str | None
    policy_axes: tuple[str, ...]
    metrics: tuple[str, ...]

    @classmethod
    def of(
        cls, table: pa.Table, *, by: str | None = None, metrics: Sequence[str] = ()
    ) -> "Comparison":
        """Group the cells of a sweep.

        Args:
            table: as `sweep_table` makes it.
            by: the axis to draw against; default: the numeric one, if there is just one.
            metrics: figures of summary.json; default: `METRICS`, as far as they are there.

        Raises:
            ValueError: no cell is complete; no such axis or figure, or one that is no number.
        """
        axes = axes_in(table)
        cells = table.to_pandas()
        for axis in axes:  # integers beside null would become floats beside NaN
            cells[axis] = pd.Series(table[axis].to_pylist(), dtype=object)
        numeric = [axis for axis in axes if axis != SEED and _is_numeric(table[axis])]
        cells = cells[cells[STATE] == "complete"].reset_index(drop=True)
        if cells.empty:
            raise ValueError("no cell of this sweep is complete")
        if by is not None and by not in numeric:
            raise ValueError(f"{by} is no numeric axis of this sweep; there are {numeric}")
        constant = [axis for axis in numeric if cells[axis].nunique() == 1]
        drawn = [axis for axis in numeric if axis not in constant]
        if by in constant or (by is None and len(drawn) == 1):
            by = None if by in constant else drawn[0]
        known = cells.columns[cells.columns.get_loc(STATE) + 1 :]
        figures = [name for name in known if pd.api.types.is_numeric_dtype(cells[name])]
        unknown = [name for name in metrics if name not in figures]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} is no figure of this sweep; there are {figures}"
            )
        shown = metrics or [m for m in METRICS if m in figures and cells[m].notna().any()]
        others = tuple(axis for axis in axes if axis not in (by, SEED, *constant))
        return cls(
            cells=cells,
            num_cells=table.num_rows,
            by=by,
            policy_axes=others,
            metrics=tuple(shown),
        )

    @property
    def num_missing(self) -> int:
        """Cells without figures: failed, or not run."""
        return self.num_cells - len(self.cells)

    @property
    def policies(self) -> dict[Policy, str]:
        """Every policy and what it is called, in the order of the table."""
        names = [axis.rpartition(".")[2] for axis in self.policy_axes]
        found: dict[Policy, str] = {}
        for policy in self._policies():
            parts = [
                value if isinstance(value, str) else f"{name}={_short(value)}"
                for name, value in zip(names, policy, strict=True)
            ]
            found[policy] = ", ".join(parts) or "all"
        return found

    def baseline(self, asked: str) -> Policy:
        """The policy that somebody means.

        Args:
            asked: the name of one of its cells, or the beginning of it; or `KEY=VALUE,...`.

        Raises:
            ValueError: nothing, or more than one policy, is meant by it.
        """
        if "=" in asked:
            wanted = dict(part.partition("=")[::2] for part in asked.split(","))
            unknown = sorted(set(wanted) - set(self.policy_axes))
            if unknown:
                raise ValueError(
                    f"{unknown[0]} sets no policies apart: {list(self.policy_axes)} do"
                )
            found = {
                policy
                for policy in self._policies()
                if all(
                    wanted.get(axis, str(value)) in (str(value), json.dumps(value))
                    for axis, value in zip(self.policy_axes, policy, strict=True)
                )
            }
        else:
            of_cells = zip(self.cells[CELL], self._policies(), strict=True)
            found = {policy for name, policy in of_cells if name.startswith(asked)}
        if len(found) != 1:
            names = [name for policy, name in self.policies.items() if policy in found]
            raise ValueError(f"baseline {asked} must mean one policy, it means {names or 'none'}")
        return found.pop()

    def means(self) -> list[Mean]:
        """Every metric of every policy everywhere."""
        found = []
        for policy, name in self.policies.items():
            for place, group in self._places(policy):
                for metric in self.metrics:
                    values = group[metric].dropna().to_numpy(np.float64)
                    if len(values):
                        found.append(Mean(name, place, metric, len(values), *_mean(values)))
        return found

    def differences(self, baseline: Policy) -> list[Difference]:
        """Of every other policy from one, paired by seed."""
        base = dict(self._places(baseline))
        found = []
        for policy, name in self.policies.items():
            for place, group in self._places(policy):
                if policy == baseline or place not in base:
                    continue
                for metric in self.metrics:
                    change = _by_seed(group, metric) - _by_seed(base[place], metric)
                    values = change.dropna().to_numpy(np.float64)
                    if len(values):
                        told = (name, self.policies[baseline], place, metric, len(values))
                        share = float((values < 0).mean())
                        found.append(Difference(*told, *_mean(values), share))
        return found

    def _policies(self) -> list[Policy]:
        """Of each cell."""
        columns = [self.cells[axis].tolist() for axis in self.policy_axes]
        return list(zip(*columns, strict=True)) if columns else [()] * len(self.cells)

    def _places(self, policy: Policy) -> Iterator[tuple[float | None, pd.DataFrame]]:
        own = self.cells[[other == policy for other in self._policies()]]
        if self.by is None:
            yield None, own
            return
        for place, group in own.groupby(self.by, sort=True):
            yield float(place), group


def spread_name(nums_seeds: Iterable[int]) -> str | None:
    """What `low` and `high` of rows with so many seeds are; None if none of them has any."""
    counts = sorted({num for num in nums_seeds if num > 1})
    few = [num for num in counts if num < FEWEST_OF_AN_INTERVAL]
    if not few:
        return INTERVAL if counts else None
    ranges = f"range of {' or '.join(map(str, few))} seeds"
    return ranges if few == counts else f"{ranges}, {INTERVAL} of more"


def _is_numeric(column: pa.ChunkedArray) -> bool:
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number and not column.null_count


def _by_seed(group: pd.DataFrame, metric: str) -> pd.Series:
    """Cells of one seed, of which there is more than one only if a key is in no axis."""
    seeds = group[SEED] if SEED in group else pd.Series(0, index=group.index)
    return group[metric].groupby(seeds.to_numpy()).mean()


def _mean(values: np.ndarray) -> tuple[float, float | None, float | None]:
    low, high = None, None
    if len(values) >= FEWEST_OF_AN_INTERVAL:
        low, high = mean_interval(values, seed=0)
    elif len(values) > 1:
        low, high = float(values.min()), float(values.max())
    return float(values.mean()), low, high


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
