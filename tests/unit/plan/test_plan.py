"""A whole plan: which batches it looks at, and that it answers where there is no advice."""

import pytest
from cost_builders import roofline, small_hardware, small_model
from plan_builders import SMALL_DEMAND, Asked, small_setup

from paxserve.plan import Demand
from paxserve.plan.memory import num_requests, whole_memory
from paxserve.plan.plan import MOST_ROWS, make_plan


def rows(plan):
    return [batch.num_rows for batch in plan.batches]


def test_batches_go_up_to_what_memory_holds():
    tight = small_hardware(memory_bytes=33_650_000)
    plan = make_plan(small_setup(hardware=tight), SMALL_DEMAND)
    most = num_requests(whole_memory(small_setup(hardware=tight)), SMALL_DEMAND.mean_context)
    assert 16 < most < 32
    assert rows(plan) == sorted({1, 2, 4, 8, 16, most, plan.advice.max_num_seqs})
    assert all(batch.fits for batch in plan.batches)
    assert rows(make_plan(small_setup(), SMALL_DEMAND))[-1] == MOST_ROWS


def test_the_rows_of_the_engine_are_looked_at_though_they_do_not_fit():
    tight = small_hardware(memory_bytes=33_650_000)
    setup = small_setup(hardware=tight, max_num_seqs=64, max_num_batched_tokens=64)
    (last,) = [batch for batch in make_plan(setup, SMALL_DEMAND).batches if batch.num_rows == 64]
    assert not last.fits


def test_the_setup_comes_first_of_its_alternatives():
    plan = make_plan(small_setup(), SMALL_DEMAND)
    assert plan.variants[0].name == "as planned"
    assert plan.variants[0].advice == plan.advice
    assert plan.ridge == 10.0
    assert plan.cost_model["class"] == "Roofline"
    assert plan.num_weights == small_model().num_weights


def test_where_nothing_can_be_advised_the_rest_is_answered():
    plan = make_plan(small_setup(), Demand(input_tokens=20, output_tokens=10, tpot_s=0.001))
    assert plan.advice is None
    assert plan.advice_refusal.startswith("a TPOT of 1 ms cannot be kept")
    assert plan.batches[0].step_s > 0


def test_a_cost_model_without_settings():
    plan = make_plan(small_setup(cost_model=Asked()), SMALL_DEMAND)
    assert plan.cost_model["class"] == "Asked"
    assert plan.batches[0].bounds_s == {"rows": 1.0, "tokens": 1.0}


def test_host_time_is_a_bound_like_others():
    slow = small_setup(cost_model=roofline(host_s_per_step=60.0))
    fast = small_setup()
    slow_s, fast_s = [make_plan(s, SMALL_DEMAND).batches[0].step_s for s in (slow, fast)]
    assert slow_s == pytest.approx(fast_s + 60.0)
