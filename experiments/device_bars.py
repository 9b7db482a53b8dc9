"""The bars that the kernels must reach on a Hopper GPU (issue 4), beside what a run measured.

Owns: the bars, and how each is read from what `device_check.py` found; nothing is assumed of what
is not there: it was not measured, and the reason is said. In: plain data. Out: a verdict each, and
their table. Must not know: how anything is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernels_pallas.bench_rows import significant
from kernels_pallas.paged_attention.pallas_gpu import is_hopper

type Found = Mapping[str, Any]

COMMAND = "python experiments/device_check.py --json device.json"
_BACKEND, _DECODE, _PROMPTS = "pallas_gpu", "llama-3-8b/decode_64x4k", "llama-3-8b/prompts_8x2k"


class NotMeasured(LookupError):
    """Why a run says nothing of a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A ratio that must be reached, at least or at most; `goal` is what it should be.

    Args:
        of: what the ratio's base is.
        measure: the ratio, from what a run found; raises NotMeasured.
    """

    name: str
    of: str
    must: float
    goal: float | None
    is_least: bool
    measure: Callable[[Found], float]

    def reaches(self, value: float, bound: float) -> bool:
        """Whether a value is on the right side of a bound; NaN is not."""
        return value >= bound if self.is_least else value <= bound

    def shown(self, bound: float | None) -> str:
        """A bound as the table shows it."""
        return "-" if bound is None else f"{'>=' if self.is_least else '<='} {bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a bar: `holds` and `measured` are None where `why` says that there is none."""

    bar: str
    must: str
    goal: str
    measured: float | None = None
    holds: bool | None = None
    reaches_goal: bool | None = None
    why: str = ""

    @property
    def text(self) -> str:
        """In words."""
        if self.holds is None:
            return f"not measured: {self.why}"
        if not self.holds:
            return "DOES NOT HOLD"
        return "holds, and the goal" if self.reaches_goal else "holds"


def _share_of_copy(found: Found) -> float:
    return _share(found, _DECODE, of="num_bytes", ceiling="copy_bytes_per_s")


def _share_of_matmul(found: Found) -> float:
    return _share(found, _PROMPTS, of="num_flops", ceiling="matmul_flops_per_s")


def _share(found: Found, shape: str, *, of: str, ceiling: str) -> float:
    row = _row(found, shape, block_size=16)
    rate = row[of] / row["timing"]["median_s"]
    return float(rate / found["bench"]["ceilings"][ceiling])


def _cost_of_blocks(found: Found) -> float:
    rows = [_row(found, _DECODE, block_size=size) for size in (16, 4096)]
    small, whole = (row["timing"]["median_s"] for row in rows)
    return float(small / whole)


def _step_over_floor(found: Found) -> float:
    step = _part(found, "step")
    if step["model"] != "llama-3-8b":
        raise NotMeasured(f"the step was that of {step['model']}")
    if step["backend"] != _BACKEND:
        raise NotMeasured(f"the step ran with {step['backend']}, not {_BACKEND}")
    return float(step["device_over_floor"])


BARS = (
    Bar(
        name="decode 64 x 4k, bfloat16, Llama-3-8B heads",
        of="copy bandwidth",
        must=0.60,
        goal=0.85,
        is_least=True,
        measure=_share_of_copy,
    ),
    Bar(
        name="the same in blocks of 16",
        of="time with a block per request",
        must=1.10,
        goal=None,
        is_least=False,
        measure=_cost_of_blocks,
    ),
    Bar(
        name="prompts 8 x 2k",
        of="matmul rate",
        must=0.25,
        goal=0.50,
        is_least=True,
        measure=_share_of_matmul,
    ),
    Bar(
        name="engine decode step of Llama-3-8B, 64 x 4k",
        of="byte floor, device time",
        must=1.4,
        goal=1.25,
        is_least=False,
        measure=_step_over_floor,
    ),
)


def verdicts(found: Found) -> list[Verdict]:
    """Of every bar.

    Args:
        found: what `device_check.py` writes: `device_kind`, and `bench` and `step` as far as they
            ran.
    """
    return [_verdict(bar, found) for bar in BARS]


def faults(given: Sequence[Verdict]) -> list[str]:
    """The bars that were measured and do not hold."""
    return [
        f"{one.bar}: {one.measured:.3g}, must be {one.must}" for one in given if one.holds is False
    ]


def table(given: Sequence[Verdict]) -> list[str]:
    """Its lines."""
    rows = [("bar", "must", "goal", "measured", "")]
    for one in given:
        measured = "-" if one.measured is None else significant(one.measured)
        rows.append((one.bar, one.must, one.goal, measured, one.text))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if any(one.holds is None for one in given):
        lines.append(f"on a Hopper GPU: {COMMAND}")
    return lines


def as_data(given: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Plain data."""
    return [asdict(one) for one in given]


def _verdict(bar: Bar, found: Found) -> Verdict:
    name = f"{bar.name}, of the {bar.of}"
    must, goal = bar.shown(bar.must), bar.shown(bar.goal)
    try:
        if not is_hopper(found["device_kind"]):
            raise NotMeasured(f"it is of a Hopper GPU, this is {found['device_kind']}")
        value = bar.measure(found)
    except NotMeasured as error:
        return Verdict(bar=name, must=must, goal=goal, why=str(error))
    return Verdict(
        bar=name,
        must=must,
        goal=goal,
        measured=value,
        holds=bar.reaches(value, bar.must),
        reaches_goal=None if bar.goal is None else bar.reaches(value, bar.goal),
    )


def _part(found: Found, name: str) -> Any:
    part = found.get(name)
    if not isinstance(part, Mapping):  # it was skipped, or raised: its text says so
        raise NotMeasured(part or f"the part {name} did not run")
    return part


def _row(found: Found, shape: str, *, block_size: int) -> Any:
    """The row of our kernel on the named shape itself."""
    for row in _part(found, "bench")["rows"]:
        problem = row["problem"]
        is_it = (row["shape"], problem["block_size"]) == (shape, block_size)
        if not is_it or row["backend"] != _BACKEND:
            continue
        if row["is_small"]:
            raise NotMeasured("the small form was run")
        if row["timing"] is None:
            raise NotMeasured(row["note"])
        return row
    raise NotMeasured(f"no row of {_BACKEND} on {shape} with block_size={block_size}")
