"""An engine on a virtual clock takes exactly what its cost model says of each step."""

import pytest
from builders import Recording, greedy, make_policies
from cost_builders import KV_BYTES_PER_TOKEN, roofline, small_hardware, small_model, target

from paxserve.assemble import planned_pool, simulated_engine
from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.prefill_first import PrefillFirst
from paxserve.cost_model import Costs
from paxserve.metrics import summarize
from paxserve.preemption.swap import Swap
from paxserve.request import Origin
from paxserve.settings import EngineSettings
from paxserve.sizing import step_bytes
from paxserve.step_shape import decodes, prompt, shape_of

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32, "block_size": 4}


def engine(policies=None, *, pads=False, leaps=True, model=None, cost_model=None, **settings):
    made = simulated_engine(
        model=model or small_model(),
        hardware=small_hardware(),
        cost_model=cost_model or roofline(host_s_per_step=0.5),
        settings=EngineSettings(**{**LIMITS, **settings}),
        policies=policies or make_policies(),
        pads=pads,
        leaps=leaps,
        say=lambda line: None,
    )
    made.executor = Recording(made.executor, made.limits)
    return made


def ask(made, num_prompt, num_output, **params):
    params = greedy(max_tokens=num_output, ignore_eos=True, **params)
    origin = Origin(num_true_output_tokens=num_output, num_declared_output_tokens=num_output)
    return made.submit({"prompt_token_ids": list(range(num_prompt))}, params, origin=origin)


def run(made):
    while made.has_work:
        made.step()
    return made


def costs(made):
    given = target(kv_cache_dtype="auto", block_size=made.limits.block_size)
    return roofline(host_s_per_step=0.5).open(given).of


@pytest.mark.parametrize(("batching", "budget"), [(ChunkedPrefill(), 16), (PrefillFirst(), 32)])
def test_every_step_takes_the_sum_of_its_terms(batching, budget):
    made = engine(make_policies(batching=batching), max_num_batched_tokens=budget)
    for length in (3, 11, 16, 5, 9):
        ask(made, length, 6)
    run(made)
    plans, of = made.executor.plans, costs(made)
    assert len(plans) == len(made.steps) > 6
    for plan, step in zip(plans, made.steps, strict=True):
        assert step.terms_s == of(shape_of(plan))
        assert step.duration_s == sum(step.terms_s)
    assert made.clock.now_s() == pytest.approx(sum(step.duration_s for step in made.steps))


def test_a_request_alone_takes_its_prompt_and_its_decodes():
    made = engine()
    ask(made, 7, 4)
    run(made)
    of = costs(made)
    expected = [sum(of(prompt(7))), *[sum(of(decodes(1, 7 + n))) for n in (1, 2, 3)]]
    assert [step.duration_s for step in made.steps] == expected
    (request,) = made.requests
    assert request.sequence.token_times_s == pytest.approx(
        [sum(expected[: n + 1]) for n in range(4)]
    )


def test_padded_shapes_cost_more():
    exact, padded = engine(), engine(pads=True, row_buckets=(4,), token_buckets=(16,))
    for made in (exact, padded):
        ask(made, 7, 3)
        run(made)
    assert [step.padded_tokens for step in padded.steps] == [16, 4, 4]
    assert [step.padded_tokens for step in exact.steps] == [7, 1, 1]
    of = costs(padded)
    assert padded.steps[1].duration_s == sum(of(decodes(1, 8)._replace(padded_tokens=4,
                                                                       padded_rows=4)))  # fmt: skip


def test_a_sequence_repeats_one_token_of_its_own():
    made = engine()
    requests = [ask(made, 4, 5) for _ in range(2)]
    run(made)
    outputs = [request.output_token_ids for request in requests]
    assert all(len(set(output)) == 1 for output in outputs)
    assert outputs[0][0] != outputs[1][0]
    assert all(0 <= output[0] < 32 for output in outputs)


def test_swaps_move_whole_blocks_and_take_their_time():
    swapping = make_policies(preemption=Swap())
    made = engine(swapping, preempt_every_steps=2, swap_space_gib=0.001)
    for length in (6, 9):
        ask(made, length, 6)
    run(made)
    moved = [len(plan.swap_in) + len(plan.swap_out) for plan in made.executor.plans]
    assert sum(moved) > 0
    block_bytes = 4 * KV_BYTES_PER_TOKEN
    moves = made.executor.inner.terms.index("moves")
    assert [step.terms_s[moves] for step in made.steps] == [n * block_bytes / 10 for n in moved]
    assert [step.swap_bytes for step in made.steps] == [n * block_bytes for n in moved]


def test_the_pool_is_what_memory_leaves():
    model, hardware = small_model(), small_hardware(memory_bytes=300_000_000)
    settings = EngineSettings(**LIMITS | {"max_num_seqs": 100_000, "memory_utilization": 0.5})
    size = planned_pool(model, hardware, settings, budget=200_000, max_model_len=32)
    step = step_bytes(model, num_tokens=200_000, num_rows=100_000)
    left = hardware.usable_bytes - model.weight_bytes - step
    assert size.num_blocks == int(0.5 * left) // (4 * KV_BYTES_PER_TOKEN)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    message = "does not fit: .* GB of weights on each of 1 small.* raise limits.tensor_parallel_si"
    with pytest.raises(ValueError, match=message):
        engine(model=small_model(vocab_size=10**7, hidden_size=64))


def test_a_length_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="max_model_len=65 is beyond the model's 64 positions"):
        engine(max_model_len=65)


class Odd:
    """A cost model whose decodes take what it was told, however odd."""

    def __init__(self, *seconds):
        self.seconds = seconds

    def open(self, target):
        return Costs(
            ("device", "host"), lambda shape: self.seconds if shape.num_decodes else (1, 1)
        )


@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((float("nan"), 0.0), "no times.*'device': nan"),
        ((0.0, float("nan")), "no times.*'host': nan"),
        ((float("inf"), 0.0), "no times.*'device': inf"),
        ((1.0, -0.5), "no times.*'host': -0.5"),
        ((1.0,), "has the terms"),
        ((1.0, 1.0, 1.0), "has the terms"),
    ],
    ids=str,
)
def test_a_cost_model_that_tells_no_times_is_named(seconds, words, leaps):
    made = engine(cost_model=Odd(*seconds), leaps=leaps)
    ask(made, 3, 9)
    with pytest.raises(ValueError, match=words):
        run(made)


@pytest.mark.parametrize("pads", [False, True])
def test_entries_of_tables_are_counted_where_tables_are(pads):
    made = engine(pads=pads)
    ask(made, 3, 9)
    run(made)
    for step in made.steps:
        assert step.padded_blocks == (step.padded_rows * 8 if pads else 0)
    share = summarize(made.requests, made.steps, made.ledger.steps())["padded_block_share"]
    assert (share is None) != pads
