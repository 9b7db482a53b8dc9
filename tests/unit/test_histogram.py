"""Percentiles of a histogram, against those of all numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve.histogram import RELATIVE_ERROR, Exact, LogHistogram

TIMES = st.one_of(st.just(0.0), st.floats(1e-9, 1e9), st.floats(0.01, 0.02))


@given(
    parts=st.lists(st.lists(TIMES, max_size=30), min_size=1, max_size=4),
    share=st.one_of(st.sampled_from([0, 50, 90, 99, 100]), st.floats(0, 100)),
)
def test_a_percentile_is_within_the_stated_error_of_the_true_one(parts, share):
    histogram, values = LogHistogram(), np.array([v for part in parts for v in part])
    for part in parts:
        histogram.add(np.array(part, np.float64))
    assert histogram.count == len(values)
    if len(values):
        exact = Exact(values).percentile(share)
        assert exact == np.percentile(values, share)
        assert histogram.percentile(share) == pytest.approx(
            exact, rel=1.000001 * RELATIVE_ERROR, abs=0
        )


def test_the_error_is_at_most_one_percent_and_is_reached():
    assert RELATIVE_ERROR <= 0.01
    histogram = LogHistogram()
    values = np.geomspace(0.001, 0.002, 1000)
    errors = []
    for value in values:
        one = LogHistogram()
        one.add(np.array([value]))
        errors.append(abs(one.percentile(50) / value - 1))
    assert RELATIVE_ERROR * 0.9 < max(errors) <= RELATIVE_ERROR * 1.000001
    assert histogram.count == 0


def test_what_lies_beyond_the_range_counts_as_its_end():
    histogram = LogHistogram()
    histogram.add(np.array([1e-12, 1e12]))
    assert histogram.percentile(0) == pytest.approx(1e-9, rel=RELATIVE_ERROR)
    assert histogram.percentile(100) == pytest.approx(1e9, rel=RELATIVE_ERROR)
