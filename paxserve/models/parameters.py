"""From tensors of any source to our parameters: the rules every source must meet.

Owns: that each parameter is filled exactly once, with the right shape and number type. In: the
source's tensor names and arrays. Out: numpy arrays named as in `config.parameter_shapes`. Must
not know: file formats, jax.
"""

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

_NAMES_SHOWN = 8


def parameter_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type of a dtype name.

    Raises:
        ValueError: neither float32 nor bfloat16.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[dtype])


def check_names(found: Collection[str], expected: Collection[str], *, source: str) -> None:
    """Require exactly the expected tensors.

    Args:
        found: names in the source.
        expected: names the model needs.
        source: what to call the source in the message.

    Raises:
        ValueError: tensors are missing or unexpected; both lists are given.
    """
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{source} does not hold this model: {len(missing)} missing {_shown(missing)}, "
            f"{len(unexpected)} unexpected {_shown(unexpected)}; check that the configuration "
            "belongs to these weights"
        )


def check_shape(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], *, source: str
) -> None:
    """Require the shape a parameter must have.

    Raises:
        ValueError: the shapes differ; both are given.
    """
    if found != expected:
        raise ValueError(
            f"{name} in {source} has shape {found}, the configuration needs {expected}; "
            "check that the configuration belongs to these weights"
        )


def to_parameter(array: Array, dtype: np.dtype[Any], *, transpose: bool) -> Array:
    """An owned, contiguous copy in our layout; `transpose` for linear maps stored [out, in]."""
    return np.array(array.T if transpose else array, dtype=dtype, order="C")


def _shown(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return f"[{', '.join(names[:_NAMES_SHOWN])}{f', and {rest} more' if rest > 0 else ''}]"
