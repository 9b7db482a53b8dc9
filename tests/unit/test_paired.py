"""Paired differences and their bootstrap interval, against what is known beforehand."""

import numpy as np
import pytest
from builders import make_engine, prompt_ids, run_to_end, submit

from paxserve.metrics import request_record
from paxserve.paired import mean_interval, paired_records, summarize_pairs


def records(step_s, *outputs):
    """Requests served one after another, on a clock of one second a step times `step_s`."""
    engine = make_engine()
    served = [submit(engine, prompt_ids(3, i), max_tokens=n) for i, n in enumerate(outputs)]
    run_to_end(engine)
    found = [request_record(request) for request in served]
    return [r._replace(ttft_s=r.ttft_s * step_s, e2e_s=r.e2e_s * step_s) for r in found]


def test_differences_are_second_less_first_and_none_where_one_is_undefined():
    first, second = records(1.0, 4, 1), records(0.5, 4, 1)
    one, other = paired_records(first, second)
    assert (one.first_e2e_s, one.second_e2e_s, one.e2e_s) == (4.0, 2.0, -2.0)
    assert (one.tpot_s, other.tpot_s, other.first_tpot_s) == (0.0, None, None)
    found = summarize_pairs([one, other])
    assert found["e2e_s"][:5] == (2, -1.25, -1.25, 1.0, 0.0)
    assert found["tpot_s"] == (1, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    assert found["e2e_s"].low == -2.0
    assert found["e2e_s"].high == -0.5


def test_only_requests_that_both_have():
    first, second = records(1.0, 4, 1), records(1.0, 4, 1)
    assert [r.request_id for r in paired_records(first, second[1:])] == ["1"]
    with pytest.raises(ValueError, match="no request in common"):
        paired_records(first[:1], second[1:])


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(5).normal(size=30)
    assert mean_interval(values, seed=1) == mean_interval(values, seed=1)
    assert mean_interval(values, seed=1) != mean_interval(values, seed=2)
    low, high = mean_interval(values, seed=1)
    assert low < values.mean() < high
    wide = mean_interval(values, seed=1, level=0.99)
    assert wide[0] < low < high < wide[1]


@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_an_interval_holds_the_true_mean_as_often_as_it_says(name):
    """240 experiments: 95 % of them, give or take four standard errors and the known optimism of
    percentile intervals of 60 values.
    """
    rng, held = np.random.default_rng(11), 0
    for seed in range(240):
        values = getattr(rng, name)(size=60) + (0.0 if name == "normal" else -1.0)
        low, high = mean_interval(values, seed=seed)
        held += low <= 0.0 <= high
    assert 0.88 <= held / 240 <= 0.985
