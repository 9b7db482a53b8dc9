"""The search for the ladder that pads least, against trying all of them."""

from itertools import combinations

import numpy as np
import pytest
from builders import make_limits
from hypothesis import given
from hypothesis import strategies as st

from paxserve.bucket_plan import BucketPlan, Padding, best_buckets, padding
from paxserve.device.buckets import Buckets


def of_steps(*steps):
    tokens, rows = zip(*steps, strict=True)
    return np.array(tokens), np.array(rows)


def brute_force(tokens, rows, limits, max_shapes, row_weight):
    """Least cost over every ladder of that many shapes, by the executor's own choice of shape."""
    most, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    costs = []
    for number in range(max_shapes):
        for sizes in combinations(range(1, budget), number):
            row_buckets = (*(s for s in sizes if s < most), most)
            token_buckets = (*(s for s in sizes if s > most), budget)
            buckets = Buckets.for_limits(
                limits, row_buckets=row_buckets, token_buckets=token_buckets
            )
            if len(buckets.shapes) <= max_shapes:
                costs.append(padding(buckets, tokens, rows).cost(row_weight))
    return min(costs)


@st.composite
def problems(draw):
    budget = draw(st.integers(1, 10))
    most = draw(st.integers(1, budget))
    step = st.integers(1, budget).flatmap(
        lambda t: st.tuples(st.just(t), st.integers(1, min(t, most)))
    )
    limits = make_limits(max_num_seqs=most, max_num_batched_tokens=budget)
    steps = draw(st.lists(step, min_size=1, max_size=12))
    weight = draw(st.sampled_from([0.0, 0.5, 1.0, 7.0]))
    return limits, of_steps(*steps), draw(st.integers(2, 5)), weight


@given(problems())
def test_no_ladder_within_the_limit_pads_less(problem):
    limits, (tokens, rows), max_shapes, weight = problem
    plan = best_buckets(tokens, rows, limits=limits, max_shapes=max_shapes, row_weight=weight)
    buckets = plan.buckets(limits)  # refuses a ladder that does not cover the limits
    assert len(buckets.shapes) <= max_shapes
    found = padding(buckets, tokens, rows).cost(weight)
    assert found == pytest.approx(brute_force(tokens, rows, limits, max_shapes, weight))


def test_enough_shapes_leave_no_padding_of_tokens():
    limits = make_limits(max_num_seqs=4, max_num_batched_tokens=64)
    tokens, rows = of_steps((3, 3), (17, 2), (33, 4), (4, 4))
    plan = best_buckets(tokens, rows, limits=limits, max_shapes=9)
    assert plan == BucketPlan(row_buckets=(3, 4), token_buckets=(17, 33, 64))
    found = padding(plan.buckets(limits), tokens, rows)
    assert found == Padding(padded_tokens=57, padded_rows=15, num_tokens=57, num_rows=13)
    assert (found.token_share, found.row_share) == (0, pytest.approx(2 / 15))
    assert found.cost(0.5) == 1.0


@pytest.mark.parametrize(("num_short", "kept"), [(2, 40), (5, 10)])
def test_of_few_shapes_the_one_that_saves_most_is_kept(num_short, kept):
    """40 saves 24 tokens in every step; 10 saves 54, in the short ones only."""
    limits = make_limits(max_num_seqs=4, max_num_batched_tokens=64)
    tokens, rows = of_steps(*[(40, 4)] * 3, *[(10, 4)] * num_short)
    assert best_buckets(tokens, rows, limits=limits, max_shapes=3).token_buckets == (kept, 64)
    assert best_buckets(tokens, rows, limits=limits, max_shapes=2).token_buckets == (64,)


@pytest.mark.parametrize(("weight", "sizes"), [(0.0, (4, 6, 9)), (2.0, (1, 4, 9))])
def test_the_weight_of_rows_decides(weight, sizes):
    """A shape for 1 token saves 3 tokens and 3 rows, once; one for 6 saves 3 tokens, twice."""
    limits = make_limits(max_num_seqs=4, max_num_batched_tokens=9)
    steps = of_steps((1, 1), (6, 2), (6, 2))
    plan = best_buckets(*steps, limits=limits, max_shapes=3, row_weight=weight)
    assert (*plan.row_buckets, *plan.token_buckets) == sizes


def test_when_rows_and_budget_are_one_size_one_shape_will_do():
    limits = make_limits(max_num_seqs=4, max_num_batched_tokens=4)
    plan = best_buckets(*of_steps((2, 2)), limits=limits, max_shapes=1)
    assert plan == BucketPlan(row_buckets=(4,), token_buckets=(4,))


@pytest.mark.parametrize(
    ("max_shapes", "weight", "words"),
    [
        (1, 1.0, r"max_shapes must be at least 2 \(max_num_seqs=4 and max_num_batched_tokens=64"),
        (True, 1.0, "got True"),
        (2.5, 1.0, "got 2.5"),
        (3, -1.0, "row_weight must be a number >= 0, got -1.0"),
        (3, float("nan"), "got nan"),
        (3, float("inf"), "got inf"),
    ],
)
def test_wrong_arguments_are_named(max_shapes, weight, words):
    limits = make_limits(max_num_seqs=4, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match=words):
        best_buckets(*of_steps((2, 2)), limits=limits, max_shapes=max_shapes, row_weight=weight)


def test_thousands_of_step_sizes_are_searched_exactly():
    limits = make_limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2048)
    tokens = np.arange(1, 2049)
    plan = best_buckets(
        tokens, np.minimum(tokens, 256), limits=limits, max_shapes=8, row_weight=0.0
    )
    sizes = [*plan.row_buckets, *plan.token_buckets]
    assert sizes == [256, 512, 768, 1024, 1280, 1536, 1792, 2048]
