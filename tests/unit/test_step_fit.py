"""Coefficients come back from steps that were made of them, and errors are what they say."""

import numpy as np
import pytest

from paxserve.step_fit import errors, fit_host, fit_regimes
from paxserve.step_profile import Features, features_of
from paxserve.step_shape import StepShape

SMALL = Features(2e-3, 1e-6, 3e-5, 0.0, 0.0, 2e-7, 0.0, 0.0)
LARGE = Features(3e-2, 0.0, 5e-5, 1e-4, 2e-3, 2e-7, 4e-7, 6e-9)


def shapes_of(padded, *, chunks, rng, number=60):
    """Steps of one padded shape: decodes, and chunks beside them if asked for."""
    shapes = []
    for _ in range(number):
        num_chunks = int(rng.integers(1, 4)) if chunks else 0
        rows = int(rng.integers(0 if chunks else 1, padded[1] - num_chunks + 1))
        length = int(rng.integers(2, padded[0] - rows + 1)) if chunks else 0
        behind = int(rng.integers(0, 500))
        shapes.append(
            StepShape(
                num_tokens=rows + length,
                num_rows=rows + num_chunks,
                padded_tokens=padded[0],
                padded_rows=padded[1],
                num_samples=rows,
                num_decodes=rows,
                decode_context=int(rng.integers(rows, 1000 * rows + 1)),
                num_chunks=num_chunks,
                chunk_tokens=length,
                chunk_context=behind + length if chunks else 0,
                chunk_pairs=behind * length + length * (length + 1) // 2,
            )
        )
    return shapes


def seconds_of(seconds, shapes):
    return [float(np.dot(seconds, features_of(shape))) for shape in shapes]


def test_each_padded_shape_gets_its_own_coefficients():
    rng = np.random.default_rng(0)
    small = shapes_of((8, 8), chunks=False, rng=rng)
    large = shapes_of((256, 32), chunks=True, rng=rng)
    seconds = seconds_of(SMALL, small) + seconds_of(LARGE, large)
    order = rng.permutation(len(seconds))
    mixed = [(small + large)[i] for i in order]
    found = fit_regimes(mixed, [seconds[i] for i in order])
    assert [regime[:2] for regime in found] == [(8, 8), (256, 32)]
    predicted = seconds_of(found[0].seconds, small) + seconds_of(found[1].seconds, large)
    assert predicted == pytest.approx(seconds, rel=1e-6)
    assert found[1].seconds == pytest.approx(LARGE, rel=1e-3, abs=1e-12)


def test_no_coefficient_is_negative():
    rng = np.random.default_rng(1)
    shapes = shapes_of((256, 32), chunks=True, rng=rng)
    seconds = [0.1 / features_of(shape).tokens for shape in shapes]  # falls with the tokens
    (found,) = fit_regimes(shapes, seconds)
    assert min(found.seconds) == 0.0
    assert max(found.seconds) > 0.0


def test_delays_by_chance_leave_the_sum_right():
    rng = np.random.default_rng(2)
    shapes = shapes_of((256, 32), chunks=True, rng=rng, number=400)
    exact = seconds_of(LARGE, shapes)
    delayed = [taken * rng.lognormal(0, 0.5) for taken in exact]
    (found,) = fit_regimes(shapes, delayed)
    assert errors(seconds_of(found.seconds, shapes), delayed).summed_bias == pytest.approx(
        0, abs=0.02
    )


def test_errors_are_relative_in_the_middle_and_summed_over_all():
    found = errors([1.1, 2.0, 8.0], [1.0, 2.0, 10.0])
    assert found.num_steps == 3
    assert found.median_absolute == pytest.approx(0.1)
    assert found.summed_bias == pytest.approx(11.1 / 13 - 1)


def test_the_gap_between_steps_grows_with_the_rows():
    rows = [1, 1, 1, 10, 10, 10, 20, 20, 20]
    gaps = [2e-4 + 1e-5 * number for number in rows]
    gaps[0], gaps[5] = 5.0, 9.0  # a pause of the machine is no median
    assert fit_host(rows, gaps) == pytest.approx((2e-4, 1e-5), rel=1e-6)


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0]])
def test_nothing_is_fitted_to_steps_without_time(seconds):
    shapes = shapes_of((8, 8), chunks=False, rng=np.random.default_rng(0), number=len(seconds))
    with pytest.raises(ValueError, match="fit nothing"):
        fit_regimes(shapes, seconds)
