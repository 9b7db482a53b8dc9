"""The real executor: what it keeps, what it compiles, what it writes, what it answers.

All on the model `tiny` (random weights) with a KV pool full of NaN, unless said otherwise.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from builders import greedy, run_to_end
from invariants import check, check_idle
from real_builders import (
    NAN,
    kv_pointers,
    loaded,
    make_real,
    poison,
    random_ids,
    real_engine,
    shared_real,
    submit_ids,
)

from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.device.buckets import Bucket
from paxserve.device.compiles import CompileCounter
from paxserve.pack import Variant
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import Scheduler
from paxserve.sizing import step_bytes
from paxserve.step import RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

GREEDY = RowSampling()


def tiny():
    return loaded("tiny")


def one_prompt(num_tokens, *, row=1, blocks=(3, 5), first=0, step_id=1):
    """A plan with the first `num_tokens` of a prompt of this length, for a fresh row."""
    ids = tuple(random_ids(num_tokens))
    return StepPlan(
        step_id=step_id,
        rows=(RowPlan(7, row, first, num_tokens, 1, ids),),
        entries=(RowEntry(7, row, num_tokens, GREEDY),),
        table_writes=(TableWrite(row, 0, blocks),),
    )


def decode(position, *, row=1, step_id=2, tokens=(), num_samples=1):
    return StepPlan(step_id=step_id, rows=(RowPlan(7, row, position, 1, num_samples, tokens),))


def run(real, plan):
    real.submit(plan)
    return real.collect()


def written_slots(real):
    """Slots (block * block_size + offset) that hold no NaN, the same in every layer, K and V."""
    masks = []
    for kv in real.kv_blocks:
        is_number = ~np.isnan(np.asarray(kv))  # [P, 2, K, S, H]
        whole = is_number.all(axis=(1, 2, 4))
        assert (whole == is_number.any(axis=(1, 2, 4))).all()
        masks.append(whole.reshape(-1))
    assert all((mask == masks[0]).all() for mask in masks)
    return set(np.flatnonzero(masks[0]).tolist())


# What a step writes.


def test_a_step_writes_its_slots_and_no_other():
    real = make_real(tiny())
    result = run(real, one_prompt(19))
    block_3 = range(3 * 16, 4 * 16)
    assert written_slots(real) == {*block_3, 5 * 16, 5 * 16 + 1, 5 * 16 + 2}
    assert (result.padded_tokens, result.padded_rows) == (128, 4)
    before = [np.asarray(kv) for kv in real.kv_blocks]
    run(real, decode(19))
    assert written_slots(real) == {*block_3, *range(5 * 16, 5 * 16 + 4)}
    for old, new in zip(before, real.kv_blocks, strict=True):
        kept = np.asarray(new)[:, :, :, :3]
        np.testing.assert_array_equal(old[3], np.asarray(new)[3])
        np.testing.assert_array_equal(old[5, :, :, :3], kept[5])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((3, 999), r"block ids of a context must be in 1\.\.P-1 .* row=0, block_ids=\[3, 999\]"),
        ((3, -1), r"block_ids=\[3, -1\]"),
        ((0, 5), r"block_ids=\[0, 5\]"),
        ((3, 3), "a row must not use a block twice"),
    ],
)
def test_debug_mode_refuses_ids_that_the_device_would_clamp(blocks, message):
    real = make_real(tiny())
    with pytest.raises(ValueError, match=message):
        real.submit(one_prompt(19, blocks=blocks))
    assert written_slots(real) == set()
    careless = make_real(tiny(), debug=False)
    careless.submit(one_prompt(19, blocks=blocks))  # nobody looks


def test_warm_up_writes_nothing():
    real = make_real(tiny())
    seconds = real.warm_up(Variant)
    assert seconds > 0
    assert set(real.executables) == {
        (bucket, variant)
        for bucket in (Bucket(4, 4), Bucket(16, 4), Bucket(128, 4))
        for variant in Variant
    }
    assert written_slots(real) == set()
    assert all(np.isnan(np.asarray(kv)).all() for kv in real.kv_blocks)
    np.testing.assert_array_equal(real._state.last_sampled, 0)


def test_warm_up_tells_how_far_it_is_and_does_nothing_twice():
    real, seen = make_real(tiny()), []
    real.warm_up([Variant.GREEDY], lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    seen.clear()
    real.warm_up([Variant.GREEDY], lambda done, total: seen.append((done, total)))
    assert seen == [(0, 0)]


def test_a_pool_larger_than_the_host_s_drops_its_padding_too():
    real = make_real(tiny(), num_blocks=9, num_device_blocks=30)
    assert all(kv.shape[0] == 30 for kv in real.kv_blocks)
    run(real, one_prompt(3))
    assert written_slots(real) == {48, 49, 50}


def test_a_pool_smaller_than_the_host_s_is_refused():
    with pytest.raises(ValueError, match=r"num_device_blocks=8 .*num_blocks=9"):
        make_real(tiny(), num_blocks=9, num_device_blocks=8)


# What stays where it is.


def serve_some(real, *, num_requests=6, max_tokens=20, params=None, policies=None, **sizes):
    """Requests of several lengths; their tokens, in order of arrival."""
    engine = real_engine(real, tiny(), policies=policies, **sizes)
    for i in range(num_requests):
        submit_ids(engine, random_ids(3 + 11 * i, seed=i), params, max_tokens=max_tokens)
    run_to_end(engine)
    check_idle(engine)
    return engine, [list(request.output_token_ids) for request in engine.requests]


def test_kv_lies_still_for_100_steps():
    real = make_real(tiny())
    before = kv_pointers(real)
    engine = real_engine(real, tiny(), max_num_batched_tokens=8)
    for num_steps in range(100):
        if len(engine.scheduler.batch.requests) < 5:
            submit_ids(engine, random_ids(3 + num_steps % 50, seed=num_steps), max_tokens=15)
        engine.step()
        assert kv_pointers(real) == before, f"moved in step {num_steps}"
    assert len(engine.steps) == 100
    assert len({(step.num_rows, step.num_tokens) for step in engine.steps}) > 4


def kv_bytes(real):
    return sum(kv.nbytes for kv in real.kv_blocks)


@pytest.mark.parametrize("variant", list(Variant))
def test_each_executable_reuses_the_pool_and_keeps_its_memory_bound(variant):
    real = make_real(tiny())
    real.warm_up([variant])
    assert len(real.executables) == 3
    for (bucket, _), executable in real.executables.items():
        memory = executable.memory_analysis()
        assert memory.alias_size_in_bytes >= kv_bytes(real)
        allowed = step_bytes(tiny().config, num_tokens=bucket.num_tokens, num_rows=bucket.num_rows)
        assert memory.temp_size_in_bytes <= allowed, (bucket, memory.temp_size_in_bytes)


@pytest.mark.parametrize(
    ("bucket", "variant"),
    [
        (Bucket(8, 8), Variant.GREEDY),
        (Bucket(8, 8), Variant.SAMPLED),
        (Bucket(64, 8), Variant.LOGPROBS),
        (Bucket(512, 8), Variant.GREEDY),
        pytest.param(Bucket(4096, 8), Variant.GREEDY, marks=pytest.mark.slow),
        pytest.param(Bucket(4096, 8), Variant.LOGPROBS, marks=pytest.mark.slow),
    ],
)
def test_so_does_smollm2(bucket, variant):
    """Compiled, but not run."""
    real = shared_real("smollm2-135m")
    packed = real._packer.padding(bucket, variant)
    memory = real._program(packed, jax.device_put(packed.arrays)).memory_analysis()
    assert memory.alias_size_in_bytes >= kv_bytes(real) == 513 * 16 * 2 * 3 * 64 * 4 * 30
    allowed = step_bytes(
        loaded("smollm2-135m").config, num_tokens=bucket.num_tokens, num_rows=bucket.num_rows
    )
    assert memory.temp_size_in_bytes <= allowed


# What is compiled.


def test_nothing_compiles_after_warm_up():
    """200 steps of prompts, chunks, decodes, ends and aborts, and of every way to sample."""
    real = make_real(tiny(), strict=True)
    real.warm_up(Variant)
    executables, counter = set(real.executables), CompileCounter()
    rng = np.random.default_rng(3)
    engine = real_engine(real, tiny(), num_blocks=1 + 12)
    ways = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 5, "seed": 1},
        {"temperature": 0.5, "top_p": 0.7, "min_p": 0.1},
        {"temperature": 0.0, "logprobs": 4},
    )
    while len(engine.steps) < 200:
        if len(engine.scheduler.batch.requests) < 8:
            params = SamplingParams(
                **ways[rng.integers(4)], max_tokens=int(rng.integers(1, 30)), ignore_eos=True
            )
            submit_ids(engine, random_ids(int(rng.integers(1, 60)), seed=len(engine.steps)), params)
        if rng.random() < 0.1:
            alive = list(engine.scheduler.batch.requests)
            engine.abort(alive[rng.integers(len(alive))])
        engine.step()
        check(engine)
    assert (counter.num_compiles, counter.num_cached) == (0, 0)
    assert set(real.executables) == executables
    assert sum(step.num_compiles for step in engine.steps) == 0
    reasons = [r.finish_reason for r in engine.requests if r.finish_reason]
    assert reasons.count("abort") >= 5
    assert reasons.count("length") >= 10
    assert sum(r.num_preemptions for r in engine.requests) >= 1
    assert {(s.padded_tokens, s.padded_rows) for s in engine.steps} == {(4, 4), (16, 4), (128, 4)}


def test_the_counter_counts():
    """Else the test above would show nothing."""
    counter = CompileCounter()
    jax.jit(lambda x: x * x + x)(np.float32(1))
    assert counter.num_compiles == 1
    assert counter.seconds > 0
    jax.jit(lambda x: x * x + x)(np.float32(1))
    assert (counter.num_compiles, counter.num_cached >= 1) == (2, True)


def test_an_unseen_shape_is_an_error_when_strict():
    real = make_real(tiny(), strict=True)
    real.warm_up([Variant.GREEDY])
    engine = real_engine(real, tiny())
    submit_ids(engine, random_ids(5), SamplingParams(temperature=1.0))
    message = "tokens=16 rows=4 variant=sampled was not compiled at warm-up"
    with pytest.raises(RuntimeError, match=message):
        engine.step()
    assert set(real.executables) == {(b, Variant.GREEDY) for b in real.buckets.shapes}


def test_otherwise_it_is_compiled_and_charged():
    real = make_real(tiny(), strict=False)
    real.warm_up([Variant.GREEDY])
    engine = real_engine(real, tiny())
    submit_ids(engine, random_ids(5), SamplingParams(temperature=1.0, max_tokens=3))
    run_to_end(engine)
    assert [step.num_compiles for step in engine.steps] == [1, 1, 0]
    for step in engine.steps:
        assert (step.compile_s > 0) == bool(step.num_compiles)
        assert step.duration_s > step.compile_s
    assert len(real.executables) == 5


def test_one_executable_per_shape_and_variant():
    real = make_real(tiny())
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (9, 0.9, 0.2)):
        params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
        serve_some(real, num_requests=2, params=params)
    assert sorted(real.executables) == [
        (Bucket(4, 4), Variant.SAMPLED),
        (Bucket(128, 4), Variant.SAMPLED),
    ]


# What it answers.


def test_tokens_fed_back_on_the_device_equal_tokens_from_the_host():
    real = make_real(tiny())
    prompt, tokens = one_prompt(9), []
    tokens.append(run(real, prompt).outputs[0].tokens[0])
    for i in range(12):
        tokens.append(run(real, decode(9 + i)).outputs[0].tokens[0])
    assert len(set(tokens)) > 3
    again = [run(real, prompt).outputs[0].tokens[0]]
    for i in range(12):
        again.append(run(real, decode(9 + i, tokens=(tokens[i],))).outputs[0].tokens[0])
    assert again == tokens
    wrong = run(real, decode(9, tokens=((tokens[0] + 1) % 512,))).outputs[0].tokens[0]
    assert wrong != tokens[1]


def test_a_row_that_does_not_sample_keeps_the_token_it_had():
    real = make_real(tiny())
    token = run(real, one_prompt(9)).outputs[0].tokens[0]
    other = StepPlan(
        step_id=3,
        rows=(RowPlan(8, 0, 0, 4, 0, (1, 2, 3, 4)),),
        entries=(RowEntry(8, 0, 9, GREEDY),),
        table_writes=(TableWrite(0, 0, (9,)),),
    )
    result = run(real, other)
    assert result.outputs == (((), ()),)
    assert real._state.last_sampled.tolist() == [0, token, 0, 0]


def recorded_run(real, **options):
    engine = real_engine(real, tiny(), recorded=True, **options)
    for i in range(5):
        submit_ids(engine, random_ids(3 + 9 * i, seed=i), max_tokens=12)
    run_to_end(engine)
    return engine


@pytest.mark.parametrize("policies", [{}, {"batching": Textbook()}, {"batching": Static()}])
def test_two_steps_in_flight_give_the_same_tokens(policies):
    """The plans of the plain loop again, each submitted before the last one is collected."""
    engine = recorded_run(shared_real("tiny"), policies=policies)
    real = make_real(tiny())
    plans, results = engine.executor.plans, []
    real.submit(plans[0])
    for plan in plans[1:]:
        real.submit(plan)
        results.append(real.collect())
    results.append(real.collect())
    assert [result.step_id for result in results] == [plan.step_id for plan in plans]
    tokens = {}
    for plan, result in zip(plans, results, strict=True):
        for row, output in zip(plan.rows, result.outputs, strict=True):
            tokens.setdefault(row.sequence_id, []).extend(output.tokens)
    assert len(tokens) == 5
    for request in engine.requests:
        assert tokens[request.sequence.sequence_id] == list(request.output_token_ids)


def test_a_step_can_be_planned_and_submitted_before_the_last_is_collected():
    """By counts, not values: the scheduler plans step n + 1 while step n runs."""
    engine = recorded_run(shared_real("tiny"), max_num_batched_tokens=16)
    expected = {r.request_id: list(r.output_token_ids)[:10] for r in engine.requests[:4]}
    real = make_real(tiny())
    overlapped = real_engine(real, tiny(), max_num_batched_tokens=16)
    scheduler: Scheduler = overlapped.scheduler
    requests = [
        submit_ids(overlapped, random_ids(3 + 9 * i, seed=i), max_tokens=40) for i in range(4)
    ]
    flying = [scheduler.plan(now_s=0.0)]
    real.submit(flying[0])
    while min(request.num_output_tokens for request in requests) < 10:
        flying.append(scheduler.plan(now_s=0.0))
        real.submit(flying[-1])
        scheduler.apply(flying.pop(0), real.collect(), now_s=0.0)
    for request in requests:
        assert list(request.output_token_ids)[:10] == expected[request.request_id]


@pytest.mark.parametrize("block_size", [1, 3])
def test_block_sizes_give_the_same_tokens(block_size):
    _, expected = serve_some(shared_real("tiny"))
    _, found = serve_some(shared_real("tiny", block_size))
    assert found == expected
    assert len({tuple(tokens) for tokens in expected}) == 6


def test_a_tiny_pool_preempts_and_changes_nothing():
    _, expected = serve_some(shared_real("tiny"))
    for policies in ({}, {"batching": Textbook()}):
        engine, found = serve_some(shared_real("tiny"), policies=policies, num_blocks=1 + 6)
        assert found == expected
        assert sum(request.num_preemptions for request in engine.requests) >= 2


# What a failure spoils.


def test_nan_weights_end_every_request_with_an_error():
    broken = replace(
        tiny(), parameters=tiny().parameters | {"final_norm": np.full(64, NAN, np.float32)}
    )
    real = make_real(broken)
    assert run(real, one_prompt(3)).outputs == (((-1,), ()),)
    engine, tokens = serve_some(real, num_requests=5)
    assert tokens == [[]] * 5
    for request in engine.requests:
        assert request.finish_reason == "error"
        assert request.error == (f"request {request.request_id}: the model's logits are not finite")


@pytest.mark.parametrize("logprobs", [None, 3])
def test_one_poisoned_request_ends_and_its_mates_do_not_notice(logprobs):
    params = greedy(max_tokens=20, ignore_eos=True, logprobs=logprobs)
    _, expected = serve_some(shared_real("tiny"), num_requests=4, params=params)
    real = make_real(tiny())
    engine = real_engine(real, tiny())
    for i in range(4):
        submit_ids(engine, random_ids(3 + 11 * i, seed=i), params)
    for _ in range(5):
        engine.step()
    victim = engine.requests[2]
    block = victim.sequence.block_table[0]
    poison(real, [block])
    run_to_end(engine)
    check_idle(engine)
    assert (victim.finish_reason, victim.num_output_tokens) == ("error", 5)
    assert "not finite" in victim.error
    assert list(victim.output_token_ids) == expected[2][:5]
    for i in (0, 1, 3):
        assert list(engine.requests[i].output_token_ids) == expected[i]
        assert engine.requests[i].finish_reason == "length"


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_step_that_fails_on_the_device_leaves_an_engine_that_serves(where, monkeypatch):
    """Also when the failed step took the donated KV with it."""
    real = make_real(tiny())
    engine = real_engine(real, tiny())
    lost = submit_ids(engine, random_ids(9), max_tokens=8)
    engine.step()
    failing = getattr(real, where)

    def fail(*arguments):
        if where == "collect":
            failing()
        for array in real.kv_blocks:
            array.delete()
        raise MemoryError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(real, where, fail)
    with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
        engine.step()
    monkeypatch.undo()
    assert (lost.finish_reason, lost.num_output_tokens) == ("error", 1)
    assert "MemoryError" in lost.error
    assert engine.step() == [lost]
    check_idle(engine)
    again = submit_ids(engine, random_ids(9), max_tokens=8)
    run_to_end(engine)
    alone = real_engine(make_real(tiny()), tiny())
    request = submit_ids(alone, random_ids(9), max_tokens=8)
    run_to_end(alone)
    assert list(again.output_token_ids) == list(request.output_token_ids)
