"""The law of tokens on a device: they are equal wherever the two best choices differ by more than
rounding could. A difference is allowed only at a near tie, and is told with its gap.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy_llama import logits

from paxserve.arrays import SamplingArrays
from paxserve.device.sampling import perturbed_logits
from paxserve.models.load import LoadedModel
from paxserve.sampling_params import SamplingParams

NEAR_TIE = 1e-3


class Difference(NamedTuple):
    """Where one sequence departs from what was expected of it, and how close the call was."""

    name: str
    position: int
    expected: int
    found: int
    gap: float


def gap_at(
    model: LoadedModel, known: Sequence[int], params: SamplingParams, *, seed: int, position: int
) -> float:
    """Between the two best perturbed logits after these tokens, at this output position."""
    values = logits(model.config, model.parameters, list(known))[-1:].astype(np.float32)
    arrays = SamplingArrays(
        temperature=np.float32([params.temperature]),
        top_k=np.int32([max(params.top_k, 0)]),
        top_p=np.float32([params.top_p]),
        min_p=np.float32([params.min_p]),
        seed=np.uint32([seed]),
        output_position=np.int32([position]),
        suppressed_ids=np.full((1, 1), -1, np.int32),
    )
    second, best = np.sort(np.asarray(perturbed_logits(values, arrays))[0])[-2:]
    return float(best - second)


def first_difference(
    model: LoadedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    expected: Sequence[int],
    found: Sequence[int],
    name: str,
) -> Difference | None:
    """None if the sequences are equal, which have the same length."""
    assert len(expected) == len(found), name
    unequal = [i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
    if not unequal:
        return None
    position = unequal[0]
    known = [*prompt, *expected[:position]]
    gap = gap_at(model, known, params, seed=seed, position=position)
    return Difference(name, position, expected[position], found[position], gap)
