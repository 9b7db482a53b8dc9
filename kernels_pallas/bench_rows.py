"""What a benchmark found: a row per kernel and shape, as lines and as plain data.

Owns: the record and how it reads. In: times, and the shape that was really run: on a CPU or in its
small form it is not the named one, and every line says so. Must not know: how anything is timed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax

from kernels_pallas.ceilings import Ceilings
from kernels_pallas.checkout import Commit, commit_of
from kernels_pallas.shapes import SHAPES, AttentionShape
from kernels_pallas.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel on one shape.

    Args:
        shape: its name.
        is_small: its small form was run.
        problem: the shape as it was run.
        kernel: as the line names it.
        backend: of ours; None: a peer that is not ours.
        tiles: fields of those it ran with; None: it has none.
        timing: None where it was not measured, and `note` says why: for lack of time, or because
            it raised.
        note: also that a measurement was cut.
    """

    shape: str
    is_small: bool
    problem: AttentionShape
    kernel: str
    backend: str | None = None
    tiles: Mapping[str, int] | None = None
    timing: Timing | None = None
    note: str = ""
    has_failed: bool = False

    @property
    def title(self) -> str:
        """The shape's name, and in what the one that was run differs from it."""
        changes = ["small"] * self.is_small
        if self.problem.dtype != SHAPES[self.shape].dtype:
            changes.append(self.problem.dtype)
        return self.shape + "".join(f" ({change})" for change in changes)

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "shape": self.shape,
            "is_small": self.is_small,
            "problem": self.problem.as_data(),
            "num_bytes": self.problem.kv_bytes,
            "num_flops": self.problem.num_flops,
            "kernel": self.kernel,
            "backend": self.backend,
            "tiles": self.tiles,
            "timing": self.timing and self.timing._asdict(),
            "note": self.note,
            "has_failed": self.has_failed,
        }


def headline(ceilings: Ceilings) -> str:
    """The device and what it can do at most."""
    return (
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copies "
        f"{significant(ceilings.copy_bytes_per_s / 1e9)} GB/s, multiplies "
        f"{significant(ceilings.matmul_flops_per_s / 1e12)} TFLOP/s in {ceilings.matmul_dtype}"
    )


def report(ceilings: Ceilings, rows: Sequence[Row]) -> dict[str, Any]:
    """A run, or as much of it as there is, as plain data."""
    commit = _commit()
    return {
        "device_kind": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit and commit._asdict(),
        "ceilings": ceilings._asdict(),
        "rows": [row.as_data() for row in rows],
    }


@cache
def _commit() -> Commit | None:
    return commit_of(Path(__file__))


def line(row: Row, ceilings: Ceilings) -> str:
    """As a line of the table."""
    names = f"{row.title:54} {row.kernel:34}"
    if row.timing is None:
        return f"{names} {row.note}"
    seconds = row.timing.median_s
    rates = (row.problem.kv_bytes / seconds, row.problem.num_flops / seconds)
    shares = (rates[0] / ceilings.copy_bytes_per_s, rates[1] / ceilings.matmul_flops_per_s)
    cells = (
        f"{names} {significant(1e6 * seconds):>8} us  {significant(rates[0] / 1e9):>6} GB/s "
        f"{significant(100 * shares[0]):>6}% of copy  {significant(rates[1] / 1e12):>8} TFLOP/s "
        f"{significant(100 * shares[1]):>6}% of matmul  {row.note}"
    )
    return cells.rstrip()


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits at least, written out."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
