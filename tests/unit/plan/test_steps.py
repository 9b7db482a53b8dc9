"""Predicted steps: the shapes that stand for a batch, and that an engine takes as long."""

import random
from statistics import mean

import pytest
from builders import greedy, make_policies
from cost_builders import roofline, small_hardware, small_model
from plan_builders import SMALL_DEMAND, Asked, configured, small_setup

from paxserve.assemble import simulated_engine
from paxserve.plan import Demand
from paxserve.plan.newcomers import newcomers
from paxserve.plan.steps import ARITHMETIC, KV, WEIGHTS, Steps
from paxserve.request import Origin, State
from paxserve.step_shape import chunk, decodes, prompt, together


def asked(**changed):
    model = Asked()
    return Steps(small_setup(cost_model=model, **changed), SMALL_DEMAND), model.shapes


def small_steps(**changed):
    return Steps(small_setup(**changed), SMALL_DEMAND)


# Shapes. Prompts of 20, outputs of 10: a decode reads 25 tokens in the mean.


def test_a_step_of_decodes_is_at_the_mean_context():
    steps, shapes = asked()
    assert steps.decode_s(3) == 6.0
    assert shapes == [decodes(3, 75)]


def test_the_mean_is_over_steps_with_prompts_and_steps_without():
    steps, shapes = asked()
    assert steps.new_tokens(3) == 6  # 3 / 10 requests a step, of 20 tokens
    # The budget takes a prompt in chunks of 12, so that half of the steps have one.
    assert steps.mean_s(3, 15) == pytest.approx(0.5 * (4 + 15) + 0.5 * (3 + 3))
    middle = chunk(4, 12, samples=False)
    assert shapes == [decodes(3, 75), together(decodes(3, 75), middle)]
    # The middle of a prompt has the mean of the pairs of all its pieces.
    assert middle.chunk_pairs == pytest.approx(prompt(20).chunk_pairs * 12 / 20)


def test_a_budget_without_room_for_them_keeps_no_batch_full():
    steps, shapes = asked()
    assert steps.mean_s(3, 9) == 13.0  # a chunk of 6 in every step
    assert len(shapes) == 2
    assert steps.mean_s(3, 8) is None
    assert len(shapes) == 2


def test_the_longest_step_has_the_ends_of_prompts():
    steps, shapes = asked()
    steps.longest_s(3, 12)
    steps.longest_s(3, 3 + 2 * 20 + 5)
    assert shapes[0] == together(decodes(3, 75), chunk(11, 9, samples=True))
    assert shapes[1] == together(decodes(3, 75), prompt(20), prompt(20), chunk(15, 5, samples=True))


def test_a_prompt_goes_in_chunks_of_what_decodes_leave():
    steps, shapes = asked()
    assert steps.prompt_s(2, 10) == (3 + 10) * 2 + (3 + 6)
    pieces = [chunk(0, 8, samples=False), chunk(8, 8, samples=False), chunk(16, 4, samples=True)]
    assert shapes == [together(decodes(2, 50), piece) for piece in pieces]
    assert steps.prompt_s(0, 32) == 1 + 20
    assert steps.prompt_s(10, 10) is None


def test_a_batching_that_splits_no_prompt_takes_it_whole():
    steps, shapes = asked(whole_prompts=True)
    assert steps.prompt_s(2, 10) == 3 + 22
    assert shapes == [together(decodes(2, 50), prompt(20))]


def test_a_first_token_waits_for_the_prompts_before_its_own():
    steps, _ = asked()
    found_s, own_s = steps.ttft_s(3, 10), steps.prompt_s(2, 10)
    new = newcomers(SMALL_DEMAND, num_rows=3, room=8)
    assert new.wait_steps > 0.1
    assert found_s == pytest.approx(own_s + new.wait_steps * (3 + 10))
    assert steps.ttft_s(1, 10) == steps.prompt_s(0, 10)


# What bounds a step.

FAST_MEMORY = small_hardware(all_reduce_latency_s=1.0, bytes_per_s=1e5, flop_per_s=1e5)


@pytest.mark.parametrize(
    ("changed", "rows", "bound"),
    [
        ({}, 1, WEIGHTS),
        ({"hardware": small_hardware(flop_per_s=1.0)}, 1, ARITHMETIC),
        ({"cost_model": roofline(compute_efficiency=0.001)}, 1, ARITHMETIC),
        ({}, 64, KV),
        ({"cost_model": roofline(host_s_per_step=60.0)}, 1, "host"),
        ({"tensor_parallel_size": 2, "hardware": FAST_MEMORY}, 1, "links"),
    ],
)
def test_what_takes_most_of_a_step(changed, rows, bound):
    steps = Steps(small_setup(**changed), Demand(input_tokens=40, output_tokens=10))
    batch = steps.batch(rows, budget=512, fits=True)
    assert batch.bound == bound
    assert sum(batch.bounds_s.values()) == pytest.approx(batch.step_s)


def test_terms_that_are_not_taken_apart_keep_their_names():
    steps, _ = asked()
    assert steps.bounds_s(decodes(3, 75)) == {"rows": 3.0, "tokens": 3.0}


def test_a_cost_model_without_an_answer():
    class Silent(Asked):
        def open(self, target):
            def of(shape):
                raise ValueError("measured to here")

            return super().open(target)._replace(of=of)

    steps = Steps(small_setup(cost_model=Silent()), SMALL_DEMAND)
    batch = steps.batch(4, budget=32, fits=True)
    found = (batch.step_s, batch.tpot_s, batch.output_tokens_per_s, batch.longest_s, batch.ttft_s)
    assert found == (None,) * 5
    assert (batch.bounds_s, batch.bound) == ({}, None)


# The ridge: 10 FLOP per byte.


def test_the_batch_at_the_ridge():
    model = small_model(hidden_size=512, mlp_size=2048, vocab_size=8192)
    steps = Steps(small_setup(model=model), SMALL_DEMAND)
    rows = steps.rows_at_ridge(0)
    assert steps.intensity(rows - 1, 0) < 10 <= steps.intensity(rows, 0)
    assert 10 <= rows < 14  # about one FLOP per byte and row
    assert steps.rows_at_ridge(10_000) > rows


def test_no_batch_reaches_a_ridge_beyond_the_intensity_of_attention():
    assert small_steps(hardware=small_hardware(flop_per_s=1e6)).rows_at_ridge(25) is None


def test_llama_3_70b_on_an_a100_is_near_150_rows():
    steps = Steps(configured("model=llama-3-70b", "hardware=a100-80g"), SMALL_DEMAND)
    assert steps.rows_at_ridge(0) == pytest.approx(153, rel=0.1)


# An engine takes as long.


def engine(setup):
    return simulated_engine(
        model=setup.model,
        hardware=setup.hardware,
        cost_model=setup.cost_model,
        settings=setup.settings,
        policies=make_policies(),
        say=lambda line: None,
    )


def run(made):
    while made.has_work:
        made.step()


def ask(made, num_prompt, num_output):
    params = greedy(max_tokens=num_output, ignore_eos=True)
    origin = Origin(num_true_output_tokens=num_output, num_declared_output_tokens=num_output)
    return made.submit({"prompt_token_ids": [1] * num_prompt}, params, origin=origin)


@pytest.mark.parametrize("overrides", [
    "model=llama-3-8b hardware=a100-80g",
    "model=llama-3-70b hardware=h100 tp=4 cost_model.host_s_per_step=0.002",
    "model=opt-13b hardware=a100-40g limits.block_size=8",
])  # fmt: skip
def test_a_simulated_engine_takes_what_was_planned(overrides):
    budget = 2048  # all prompts in one step, so that all requests decode at one context
    setup = configured(*overrides.split(), "limits.max_num_seqs=16",
                       f"limits.max_num_batched_tokens={budget}")  # fmt: skip
    steps = Steps(setup, Demand(input_tokens=96, output_tokens=9))
    made, alone = engine(setup), engine(setup)
    for _ in range(16):
        ask(made, 96, 9)
    request = ask(alone, 96, 2)
    run(made)
    run(alone)
    in_decodes = [step for step in made.steps if step.num_tokens == step.num_rows == 16]
    assert len(in_decodes) == 8
    assert in_decodes[4].duration_s == steps.decode_s(16)  # the fifth reads 96 + 5
    assert request.sequence.token_times_s[0] == steps.prompt_s(0, budget)


def test_a_prompt_in_chunks_beside_decodes_is_as_fast_as_planned():
    setup = configured("model=llama-3-8b", "hardware=a100-80g", "limits.max_num_seqs=16",
                       "limits.max_num_batched_tokens=64")  # fmt: skip
    demand = Demand(input_tokens=200, output_tokens=400)
    planned_s = Steps(setup, demand).prompt_s(9, 64)
    made = engine(setup)
    for _ in range(9):
        ask(made, 200, 400)
    for _ in range(9 * 200 // 50 + 150):
        made.step()
    late = ask(made, 200, 2)
    while not late.sequence.token_times_s:
        made.step()
    found_s = late.sequence.token_times_s[0] - late.arrival_s
    assert found_s == pytest.approx(planned_s, rel=0.01)


def closed_loop(setup, num_users, *, num_rounds, lengths):
    """Users who ask again as soon as they are answered; what they saw from the third round on:
    mean TPOT, mean TTFT, output tokens per second.
    """
    made, rng = engine(setup), random.Random(0)

    def asks():
        low, high = lengths
        return ask(made, round(1024 * rng.uniform(low, high)), round(256 * rng.uniform(low, high)))

    asking, answered = [asks() for _ in range(num_users)], []
    while len(answered) < num_rounds * num_users:
        made.step()
        for place, request in enumerate(asking):
            if request.state is State.FINISHED:
                answered.append(request)
                asking[place] = asks()
    begun_s = answered[3 * num_users - 1].sequence.token_times_s[-1]
    answered = answered[3 * num_users :]
    times = [request.sequence.token_times_s for request in answered]
    return (
        mean((t[-1] - t[0]) / (len(t) - 1) for t in times),
        mean(t[0] - request.arrival_s for t, request in zip(times, answered, strict=True)),
        sum(map(len, times)) / (times[-1][-1] - begun_s),
    )


@pytest.mark.parametrize("num_users", [8, 16, 32, 64])
def test_a_closed_loop_has_the_tpot_and_the_throughput_that_were_planned(num_users):
    """Prompts share few steps and fill those: an even spread of them over all steps, inside tiles
    that decodes pay for anyway, would be a fifth too fast at 16.
    """
    setup = eight_billion(num_users)
    batch = Steps(setup, Demand()).batch(num_users, budget=512, fits=True)
    tpot_s, _, tokens_per_s = closed_loop(setup, num_users, num_rounds=5, lengths=(1, 1))
    assert batch.tpot_s == pytest.approx(tpot_s, rel=0.05)
    assert batch.output_tokens_per_s == pytest.approx(tokens_per_s, rel=0.05)


@pytest.mark.parametrize("num_users", [16, 64])
def test_a_closed_loop_of_varied_lengths_has_the_ttft_that_was_planned(num_users):
    setup = eight_billion(num_users)
    batch = Steps(setup, Demand()).batch(num_users, budget=512, fits=True)
    tpot_s, ttft_s, _ = closed_loop(setup, num_users, num_rounds=9, lengths=(0.5, 1.5))
    assert batch.tpot_s == pytest.approx(tpot_s, rel=0.1)
    assert batch.ttft_s == pytest.approx(ttft_s, rel=0.15)


def eight_billion(max_num_seqs):
    return configured("model=llama-3-8b", "hardware=a100-80g",
                      f"limits.max_num_seqs={max_num_seqs}",
                      "limits.max_num_batched_tokens=512")  # fmt: skip
