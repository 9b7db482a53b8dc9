"""Coefficients from measured steps, by non-negative least squares.

Owns: what is minimised: the relative error, since short steps matter as much as long ones. In: the
shapes of steps and their seconds. Out: `Regime`s, what the host takes, `Errors`. Must not know: how
steps were measured.

Source: Lawson and Hanson, "Solving least squares problems", 1974 (as scipy.optimize.nnls).
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from paxserve.step_profile import Errors, Features, Regime, features_of
from paxserve.step_shape import StepShape

NUM_FITS = 4


def fit_regimes(shapes: Sequence[StepShape], seconds: Sequence[float]) -> tuple[Regime, ...]:
    """One regime for each padded shape that occurs.

    Raises:
        ValueError: no steps, or one that took no time.
    """
    if not shapes or min(seconds) <= 0:
        raise ValueError(
            f"{len(shapes)} steps of at least {min(seconds, default=0):g} s fit nothing"
        )
    steps: dict[tuple[int, int], list[tuple[Features, float]]] = defaultdict(list)
    for shape, taken_s in zip(shapes, seconds, strict=True):
        steps[shape.padded_tokens, shape.padded_rows].append((features_of(shape), taken_s))
    return tuple(
        [
            Regime(*padded, Features(*_fit([f for f, _ in own], [s for _, s in own])))
            for padded, own in sorted(steps.items())
        ]
    )


def fit_host(rows: Sequence[int], gaps_s: Sequence[float]) -> tuple[float, float]:
    """Seconds per step and per row between steps, from the median gap at each number of rows."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for number, gap_s in zip(rows, gaps_s, strict=True):
        by_rows[number].append(gap_s)
    medians = [float(np.median(gaps)) for gaps in by_rows.values()]
    per_step, per_row = _fit([(1.0, float(number)) for number in by_rows], medians)
    return per_step, per_row


def errors(predicted_s: Sequence[float], measured_s: Sequence[float]) -> Errors:
    """How far predictions are off."""
    predicted, measured = np.asarray(predicted_s), np.asarray(measured_s)
    return Errors(
        num_steps=len(measured),
        median_absolute=float(np.median(np.abs(predicted / measured - 1))),
        summed_bias=float(predicted.sum() / measured.sum() - 1),
    )


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Each row is divided by its seconds, at first the measured ones, then by what was fitted to
    it: a step that was delayed by chance would weigh less than one that was not, and all
    predictions be too low.
    """
    matrix, measured = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
    expected = measured
    for _ in range(NUM_FITS):
        weighted = matrix / expected[:, None]
        scale = np.maximum(weighted.max(0), np.finfo(np.float64).tiny)
        found, _ = nnls(weighted / scale, measured / expected)
        coefficients = found / scale
        expected = np.maximum(matrix @ coefficients, measured.min())
    fitted: list[float] = coefficients.tolist()
    return fitted
