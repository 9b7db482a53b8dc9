"""DistServe's coefficients: a step is a sum of counts, each times a number.

A prompt of n tokens takes a + b n + c n^2, a step of decodes a + b context + c rows, in two ranges
of rows; by model and group size. A chunk behind p tokens counts n^2 + 2 p n, so that a prompt in
chunks has the squares of the whole. Prompts and decodes were measured apart; where a step has both,
the larger of the two constants is taken once, as the weights are read once. A formula goes on
beyond what was measured. There are no sizes in the file: that `entry` is the model that is
simulated, it cannot check.

Source: Zhong et al., "DistServe", OSDI 2024, and the profiles of its artifact (milliseconds,
A100-80G). Its milliseconds per stage of a pipeline are left out: there are no pipelines here.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from paxserve.cost_model import Costs, Target
from paxserve.numbers import MOST_TOKENS, shown, whole
from paxserve.profiles import Files, Format, terms_of
from paxserve.step_shape import StepShape
from paxserve.traces.text_file import open_text

TERMS = ("fixed", "prompt_tokens", "prompt_pairs", "decode_context", "decode_rows")
_MS = 1e-3


class Coefficients(NamedTuple):
    """Seconds: of a step, and per what the range counts."""

    fixed: float
    first: float
    second: float


class Fit(NamedTuple):
    """Of one model on one size of group; from `many_rows` decodes on, `many` holds."""

    prompt: Coefficients
    few: Coefficients
    many: Coefficients
    many_rows: int


def read(path: str, entry: str, num_devices: int) -> Fit:
    """One fit of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none of DistServe's, or has no such fit.
    """
    with open_text(path, what="profile") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    sizes = _member(_member(found, entry, path), str(num_devices), f"{path} {entry}")
    place = f"{path} {entry} {num_devices}"
    return Fit(
        _coefficients(sizes, "prefill", place),
        _coefficients(sizes, "decoding_smallbs", place),
        _coefficients(sizes, "decoding_largebs", place),
        whole(
            f"{place} decoding_large_small_bs_threshold",
            _member(sizes, "decoding_large_small_bs_threshold", place),
            high=MOST_TOKENS,
        ),
    )


def open_profile(files: Files, target: Target, rest: Costs) -> Costs:
    """See `Format.open`."""
    assert files.entry is not None
    fit = read(files.path, files.entry, target.num_devices)
    others = terms_of(rest, "moves", "host")

    def of(shape: StepShape) -> tuple[float, ...]:
        squares = 2 * shape.chunk_pairs - shape.chunk_tokens
        decode = fit.few if shape.num_decodes < fit.many_rows else fit.many
        seconds = (
            max(
                fit.prompt.fixed if shape.num_chunks else 0.0,
                decode.fixed if shape.num_decodes else 0.0,
            ),
            fit.prompt.first * shape.chunk_tokens,
            fit.prompt.second * squares,
            decode.first * shape.decode_context,
            decode.second * shape.num_decodes,
        )
        if sum(seconds) < 0:
            raise ValueError(
                f"{files.path} {files.entry}: its formula gives {sum(seconds):g} s for a step of "
                f"{shape.chunk_tokens} prompt tokens and {shape.num_decodes} decodes: lower "
                "max_num_batched_tokens to what was measured"
            )
        return seconds + others(rest.of(shape))

    return Costs((*TERMS, "moves", "host"), of)


FORMAT = Format(needs=("entry",), takes=(), open=open_profile)


def _member(found: Any, key: str, place: str) -> Any:
    if not isinstance(found, Mapping):
        raise ValueError(f"{place} must be an object, got {shown(found)}")
    if key not in found:
        raise ValueError(f"{place} has no {key}; it has {', '.join(map(str, found))}")
    return found[key]


def _coefficients(sizes: Any, key: str, place: str) -> Coefficients:
    values = _member(sizes, key, place)
    is_fit = isinstance(values, list) and len(values) == 3
    if not is_fit or not all(_is_finite(value) for value in values):
        raise ValueError(f"{place} {key} must be three numbers, got {shown(values)}")
    return Coefficients(*[value * _MS for value in values])


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
