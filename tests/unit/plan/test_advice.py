"""The rule for limits: against a search of every pair, and an engine that serves by them."""

import math

import pytest
from builders import greedy, make_policies
from cost_builders import KV_BYTES_PER_TOKEN, roofline, small_hardware, small_model
from plan_builders import configured, small_setup

from paxserve.assemble import simulated_engine
from paxserve.plan import Demand, Setup
from paxserve.plan.advice import BUDGET, BUDGETS, KV, MOST_UTILIZATION, TPOT, advise
from paxserve.plan.memory import num_requests
from paxserve.plan.steps import Steps
from paxserve.plan.what_if import variants
from paxserve.request import Origin
from paxserve.sizing import step_bytes

DEMAND = Demand(input_tokens=20, output_tokens=10, tpot_s=1500.0)


def keeps(setup: Setup, demand: Demand, rows: int, budget: int) -> bool:
    """The conditions of the rule, in its words."""
    steps = Steps(setup, demand)
    if steps.mean_s(rows, budget) is None or steps.longest_s(rows, budget) > demand.tpot_s:
        return False
    limited = setup.with_settings(
        max_num_seqs=rows, max_num_batched_tokens=budget, memory_utilization=0.95
    )
    try:
        limits = limited.limits()[1]
    except ValueError:
        return False
    return num_requests(limits, demand.mean_context) >= rows


def best_of_all(setup: Setup, demand: Demand, most_rows: int) -> tuple[float, int, int]:
    """(tokens per second, rows, budget) by looking at every pair."""
    steps, found = Steps(setup, demand), []
    for budget in BUDGETS:
        rows = [n for n in range(1, min(budget, most_rows) + 1) if keeps(setup, demand, n, budget)]
        if rows:
            found.append((rows[-1] / steps.mean_s(rows[-1], budget), -budget, rows[-1]))
    speed, budget, most = max(found)
    return speed, most, -budget


@pytest.mark.parametrize(
    ("changed", "tpot_s", "limited_by"),
    [
        ({}, 1500.0, TPOT),
        ({}, 400.0, BUDGET),
        ({"cost_model": roofline(host_s_per_row=20.0)}, 1500.0, BUDGET),
        ({"hardware": small_hardware(memory_bytes=33_650_000)}, 1e3, KV),
        ({"kv_cache_dtype": "int8", "model": small_model(head_dim=16)}, 1500.0, BUDGET),
    ],
)
def test_no_pair_is_better(changed, tpot_s, limited_by):
    setup = small_setup(**changed)
    demand = Demand(input_tokens=20, output_tokens=10, tpot_s=tpot_s)
    advice = advise(setup, demand)
    speed, rows, budget = best_of_all(setup, demand, most_rows=50)
    assert rows < 50
    assert advice.output_tokens_per_s == pytest.approx(speed)
    assert (advice.max_num_seqs, advice.max_num_batched_tokens) == (rows, budget)
    assert advice.limited_by == limited_by
    assert advice.longest_s <= tpot_s
    assert advice.requests_per_s == pytest.approx(speed / 10)


def test_the_least_share_of_memory_that_holds_the_rows():
    setup = small_setup(hardware=small_hardware(memory_bytes=33_800_000))
    advice = advise(setup, DEMAND)
    assert not advice.preempts
    needed = 1 + advice.max_num_seqs * 8  # blocks of 29 slots
    assert advice.num_blocks >= needed

    def blocks(share):
        limited = setup.with_settings(
            max_num_seqs=advice.max_num_seqs,
            max_num_batched_tokens=advice.max_num_batched_tokens,
            memory_utilization=share,
        )
        return limited.limits()[1].num_blocks

    assert blocks(advice.memory_utilization) == advice.num_blocks
    assert blocks(advice.memory_utilization - 0.01) < needed
    step = step_bytes(
        small_model(),
        num_tokens=advice.max_num_batched_tokens,
        num_rows=advice.max_num_seqs,
    )
    kv = advice.num_blocks * 4 * KV_BYTES_PER_TOKEN
    assert advice.vllm_memory_utilization == pytest.approx(
        (small_model().weight_bytes + step + kv) / 33_800_000, abs=1e-3
    )


def test_where_memory_ends_some_are_preempted():
    setup = small_setup(hardware=small_hardware(memory_bytes=33_650_000))
    advice = advise(setup, Demand(input_tokens=20, output_tokens=10, tpot_s=1e3))
    assert advice.limited_by == KV
    assert advice.preempts
    assert advice.memory_utilization == MOST_UTILIZATION


def test_a_tpot_that_no_step_keeps():
    with pytest.raises(ValueError, match="a TPOT of 1 ms cannot be kept: a step of one request"):
        advise(small_setup(), Demand(input_tokens=20, output_tokens=10, tpot_s=0.001))


def test_a_tpot_that_leaves_no_room_for_prompts():
    setup = small_setup(max_model_len=60)
    shortest_s = Steps(setup, Demand(input_tokens=58, output_tokens=1)).decode_s(1)
    demand = Demand(input_tokens=58, output_tokens=1, tpot_s=shortest_s * 1.01)
    with pytest.raises(ValueError, match="no limits serve requests of 58 and 1 tokens with steps"):
        advise(setup, demand)


def test_requests_longer_than_the_model_takes():
    with pytest.raises(ValueError, match="are 70 tokens, beyond max_model_len=64"):
        advise(small_setup(), Demand(input_tokens=60, output_tokens=10))


def test_prompts_that_are_not_split_need_the_budget_of_the_longest():
    advice = advise(small_setup(whole_prompts=True), DEMAND)
    assert advice.max_num_batched_tokens >= 64
    assert advise(small_setup(whole_prompts=True, max_model_len=50), DEMAND)


@pytest.mark.parametrize("overrides", [
    "model=llama-3-8b hardware=a100-80g",
    "model=llama-3-8b hardware=rtx4090",
    "model=llama-3-70b hardware=h100 tp=4",
])  # fmt: skip
def test_an_engine_with_these_limits_does_what_was_predicted(overrides):
    """Users who ask again as soon as they are answered keep the batch full."""
    demand = Demand(input_tokens=256, output_tokens=64)
    setup = configured(*overrides.split())
    advice = advise(setup, demand)
    made = simulated_engine(
        model=setup.model,
        hardware=setup.hardware,
        cost_model=setup.cost_model,
        settings=setup.with_settings(
            max_num_seqs=advice.max_num_seqs,
            max_num_batched_tokens=advice.max_num_batched_tokens,
            memory_utilization=advice.memory_utilization,
        ).settings,
        policies=make_policies(),
        say=lambda line: None,
    )
    num_asked = 5 * advice.max_num_seqs
    for _ in range(num_asked):
        params = greedy(max_tokens=64, ignore_eos=True)
        origin = Origin(num_true_output_tokens=64, num_declared_output_tokens=64)
        made.submit({"prompt_token_ids": [1] * 256}, params, origin=origin)
    for _ in range(4 * 64):
        made.step()
    full = [step for step in made.steps[64:] if step.num_running == advice.max_num_seqs]
    assert len(full) > 100
    steps_s = [step.duration_s for step in full]
    assert max(steps_s) <= demand.tpot_s
    assert sum(steps_s) / len(steps_s) == pytest.approx(advice.tpot_s, rel=0.1)
    assert made.steps[-1].num_waiting > 0
    num_preempted = sum(request.num_preemptions for request in made.requests)
    assert (num_preempted > 0) == advice.preempts


# What changes what.


def named(setup, demand=DEMAND):
    return {variant.name: variant for variant in variants(setup, demand)}


def test_one_thing_changes_at_a_time():
    found = named(configured("model=llama-3-70b", "hardware=h100", "tp=4"), Demand())
    assert list(found) == [
        "as planned", "64 KV heads (MHA)", "KV in int8", "KV in fp8", "1 device", "2 devices",
        "8 devices",
    ]  # fmt: skip
    planned, mha, eight_bit = [found[n] for n in ("as planned", "64 KV heads (MHA)", "KV in int8")]
    assert planned.kv_bytes_per_token == 327_680
    assert mha.kv_bytes_per_token == 8 * 327_680
    assert mha.weight_bytes - planned.weight_bytes == 80 * 2 * 2 * 8192 * 56 * 128 // 4
    assert eight_bit.kv_bytes_per_token == 80 * 8 * 2 * (128 + 4)
    assert eight_bit.num_tokens == pytest.approx(planned.num_tokens * 256 / 132, rel=0.01)
    assert found["8 devices"].weight_bytes * 2 == planned.weight_bytes
    assert found["1 device"].refusal.startswith("the model does not fit: 141.1 GB of weights")
    assert found["1 device"].advice is None
    per_device = planned.output_tokens_per_s_and_device
    assert per_device == planned.advice.output_tokens_per_s / 4
    assert mha.advice.output_tokens_per_s < planned.advice.output_tokens_per_s


def test_a_model_with_all_its_heads_is_asked_about_fewer():
    found = named(configured("model=opt-13b", "hardware=a100-80g"), Demand(input_tokens=512))
    assert "8 KV heads (GQA)" in found
    assert found["8 KV heads (GQA)"].kv_bytes_per_token * 5 == 819_200
    refusal = found["8 devices"].refusal
    assert refusal is None
    assert named(small_setup())["4 devices"].refusal == (
        "tensor_parallel_size=4 does not divide num_kv_heads=2"
    )


def test_an_8_bit_cache_is_asked_about_16():
    found = named(small_setup(kv_cache_dtype="fp8"))
    assert found["KV in bfloat16"].kv_bytes_per_token == KV_BYTES_PER_TOKEN
    assert not math.isnan(found["KV in bfloat16"].step_s)
