"""What was measured of steps: coefficients per shape, kept as a file.

Owns: `Profile`, its file, and the time of a step by it. In: a JSON file, or coefficients that were
fitted. Out: `Costs`. Must not know: how steps were measured, or fitted.

    seconds of a step = host + the coefficients of its regime x its features

A regime is a padded shape that was compiled, since what a step computes follows from it; what has
no padding has one regime for all steps. Features are the counts of `step_shape.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from paxserve.cost_model import Costs, Target
from paxserve.files import write_text
from paxserve.models.dimensions import Dimensions
from paxserve.numbers import real, shown, whole
from paxserve.step_shape import StepShape

VERSION = 2
MOST_S = 3600.0  # of any coefficient


class Features(NamedTuple):
    """What a step's time is linear in; one coefficient each, in seconds.

    decoding: 1 where any row decodes. The pass over decodes begins then; on a CPU that takes as
    long as the attention of some thousand tokens.
    """

    base: float
    tokens: float
    rows: float
    chunks: float
    decoding: float
    decode_context: float
    chunk_context: float
    chunk_pairs: float


TERMS = (*Features._fields, "host")


def features_of(shape: StepShape) -> Features:
    """The counts of one step."""
    return Features(
        1.0,
        shape.num_tokens,
        shape.num_rows,
        shape.num_chunks,
        float(shape.num_decodes > 0),
        shape.decode_context,
        shape.chunk_context,
        shape.chunk_pairs,
    )


class Regime(NamedTuple):
    """Coefficients of the steps that are padded to one shape; None: of all steps."""

    padded_tokens: int | None
    padded_rows: int | None
    seconds: Features


class Errors(NamedTuple):
    """Of predicted steps. median_absolute: of |predicted / measured - 1|; summed_bias: of the sum
    of all predictions, relative to the sum of what was measured.
    """

    num_steps: int
    median_absolute: float
    summed_bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Attributes:

    model, num_devices, hardware, kv_cache_dtype, block_size: what was measured, as of `Target`;
        hardware by its name.
    device: its kind, as its runtime says.
    sampling: the variant of the steps: greedy, sampled, or logprobs.
    kernel: the backend of attention that ran.
    versions: of what ran.
    regimes: at least one.
    host_s_per_step, host_s_per_row: between two steps, when the device waits.
    errors: by what they are of: fitted (steps that were fitted), held_out (shapes that were not),
        served (steps of requests that were served).
    """

    model: Dimensions
    num_devices: int
    hardware: str
    kv_cache_dtype: str
    block_size: int
    device: str
    sampling: str
    kernel: str
    versions: Mapping[str, str | None]
    regimes: tuple[Regime, ...]
    host_s_per_step: float
    host_s_per_row: float
    errors: Mapping[str, Errors]

    def __post_init__(self) -> None:
        """Check what a step's time is made of."""
        whole("num_devices", self.num_devices, low=1, high=4096)
        whole("block_size", self.block_size, low=1, high=10**6)
        for name in ("host_s_per_step", "host_s_per_row"):
            real(name, getattr(self, name), high=MOST_S)
        if not self.regimes:
            raise ValueError("regimes must not be empty")
        for i, regime in enumerate(self.regimes):
            for name in ("padded_tokens", "padded_rows"):
                if getattr(regime, name) is not None:
                    whole(f"regimes[{i}].{name}", getattr(regime, name), low=1, high=10**7)
            for name, seconds in regime.seconds._asdict().items():
                real(f"regimes[{i}].seconds.{name}", seconds, high=MOST_S)
        sizes = [(regime.padded_tokens, regime.padded_rows) for regime in self.regimes]
        if len(set(sizes)) < len(sizes) or ((None, None) in sizes and len(sizes) > 1):
            raise ValueError(f"regimes must be of different shapes, got {sizes}")

    def check(self, target: Target) -> None:
        """Whether it was measured of what is to be simulated, as far as that is said.

        Raises:
            ValueError: it was not; both values are named.
        """
        pairs = [
            ("hardware", self.hardware, target.hardware.name),
            ("tensor_parallel_size", self.num_devices, target.num_devices),
            ("kv_cache_dtype", self.kv_cache_dtype, target.kv_cache_dtype),
            ("block_size", self.block_size, target.block_size),
            ("sampling", self.sampling, target.sampling),
            ("kernel", self.kernel, target.kernel),
        ]
        ours, theirs = asdict(self.model), asdict(target.model)
        pairs += [(f"model.{name}", ours[name], theirs[name]) for name in ours]
        for name, measured, wanted in pairs:
            if wanted is not None and measured != wanted:
                raise ValueError(
                    f"the profile was measured with {name}={measured}, and {name}={wanted} is to "
                    "be simulated: calibrate for that, or choose what was measured"
                )

    def costs(self) -> Costs:
        """How long steps take, term by term."""
        by_shape = {(r.padded_tokens, r.padded_rows): r.seconds for r in self.regimes}
        of_all = by_shape.get((None, None))
        host_s, host_s_per_row = self.host_s_per_step, self.host_s_per_row

        def of(shape: StepShape) -> tuple[float, ...]:
            seconds = of_all or by_shape.get((shape.padded_tokens, shape.padded_rows))
            if seconds is None or shape.num_copied or shape.num_swapped:
                raise ValueError(_lacking(shape, by_shape))
            counts = features_of(shape)
            terms = [each * count for each, count in zip(seconds, counts, strict=True)]
            return (*terms, host_s + host_s_per_row * shape.num_rows)

        return Costs(TERMS, of)

    def to_json(self) -> dict[str, Any]:
        """As it stands in its file."""
        return {
            "version": VERSION,
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "model": asdict(self.model),
            "regimes": [r._asdict() | {"seconds": r.seconds._asdict()} for r in self.regimes],
            "errors": {of: errors._asdict() for of, errors in self.errors.items()},
        }


def write_profile(path: Path, profile: Profile) -> None:
    """Whole or not at all."""
    write_text(path, json.dumps(profile.to_json(), indent=1) + "\n")


def read_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is malformed, or of another version; file and place are named.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: `paxserve calibrate --out` writes it")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _profile(found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no profile of steps: {what}") from error


def _profile(found: Any) -> Profile:
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        raise ValueError(f"it must be an object with version {VERSION}")
    known = {f.name for f in fields(Profile)}
    if set(found) != known:
        raise ValueError(f"it has {shown(sorted(found))}, and must have {sorted(known)}")
    regimes = [
        Regime(r["padded_tokens"], r["padded_rows"], Features(**r["seconds"]))
        for r in found["regimes"]
    ]
    made = {
        "model": Dimensions(**found["model"]),
        "regimes": tuple(regimes),
        "errors": {of: Errors(**errors) for of, errors in found["errors"].items()},
    }
    return Profile(**{**found, **made})


def _lacking(shape: StepShape, known: Mapping[tuple[int | None, int | None], Features]) -> str:
    if shape.num_copied or shape.num_swapped:
        return (
            f"a step copies {shape.num_copied} and swaps {shape.num_swapped} blocks, of which the "
            "profile says nothing: choose preemption=recompute and one sequence per request, or "
            "cost_model=roofline"
        )
    return (
        f"a step is padded to {shape.padded_tokens} tokens and {shape.padded_rows} rows, and the "
        f"profile has {sorted(known, key=str)}: set executor.pads=true, and limits as they were "
        "when it was measured"
    )
