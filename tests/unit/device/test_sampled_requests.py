"""Sampling from the request to its tokens: they depend on seed and position, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from builders import run_to_end
from invariants import check_idle
from numpy_llama import logits
from real_builders import loaded, random_ids, real_engine, shared_real, submit_ids

from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.pack import Variant
from paxserve.sampling_params import SamplingParams

NUM_TOKENS = 12
PROMPT = random_ids(21, seed=100)
LOGPROB_TOLERANCE = 2e-4


def seeded(seed=1234, **values):
    """A request at temperature 0.9 with filters that matter."""
    defaults = {"temperature": 0.9, "top_p": 0.95, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(**(defaults | {"seed": seed} | values))


def make_engine(*, eos=(), **options):
    model = loaded("tiny")
    model = replace(model, config=replace(model.config, eos_token_ids=eos))
    return real_engine(shared_real("tiny"), model, **options)


def serve(params, *, before=0, after=0, **options):
    """The prompt between others; its request."""
    engine = make_engine(**options)
    for i in range(before):
        submit_ids(engine, random_ids(4 + 7 * i, seed=i), seeded(seed=i, max_tokens=20))
    request = submit_ids(engine, PROMPT, params)
    for i in range(after):
        submit_ids(engine, random_ids(30 - 9 * i, seed=50 + i), seeded(seed=9, max_tokens=20))
    run_to_end(engine)
    check_idle(engine)
    return request


def tokens_of(request):
    return list(request.output_token_ids)


@pytest.fixture(scope="module")
def alone():
    return tokens_of(serve(seeded()))


@pytest.mark.parametrize(
    "options",
    [
        {"before": 1},
        {"before": 3},
        {"after": 3},
        {"before": 2, "after": 4},
        {"before": 1, "max_num_batched_tokens": 4},
        {"after": 1, "max_num_batched_tokens": 7},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"before": 2, "after": 2, "policies": {"batching": Textbook()}},
        {"before": 2, "after": 2, "policies": {"batching": Static()}},
    ],
    ids=str,
)
def test_company_rows_and_chunks_do_not_matter(alone, options):
    assert len(alone) == NUM_TOKENS
    assert tokens_of(serve(seeded(), **options)) == alone


def test_the_row_does_not_matter(alone):
    rows = set()
    for before in range(4):
        engine = make_engine()
        for i in range(before):
            submit_ids(engine, random_ids(3, seed=i), max_tokens=40)
        request = submit_ids(engine, PROMPT, seeded())
        engine.step()
        rows.add(request.sequence.row)
        run_to_end(engine)
        assert tokens_of(request) == alone
    assert rows == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_steps", range(1, NUM_TOKENS))
def test_a_preemption_after_every_token_changes_nothing(num_steps, temperature):
    params = seeded(temperature=temperature, logprobs=2 if num_steps % 2 else None)
    expected = tokens_of(serve(params))
    engine = make_engine()
    mate = submit_ids(engine, random_ids(5), seeded(seed=3, max_tokens=20))
    request = submit_ids(engine, PROMPT, params)
    for _ in range(num_steps):
        engine.step()
    assert request.num_output_tokens == num_steps
    batch = engine.scheduler.batch
    batch.preempt(request, num_lost_tokens=request.sequence.num_computed_tokens, method="recompute")
    late = submit_ids(engine, random_ids(9, seed=2), seeded(seed=4, max_tokens=20))
    run_to_end(engine)
    assert tokens_of(request) == expected
    assert request.num_preemptions == 1
    assert (mate.num_output_tokens, late.num_output_tokens) == (20, 20)
    if params.logprobs:
        assert len(request.sequence.logprobs) == NUM_TOKENS


def test_preemption_by_a_tiny_pool_changes_nothing(alone):
    request = serve(seeded(), before=3, num_blocks=1 + 6)
    assert request.num_preemptions >= 1
    assert tokens_of(request) == alone


def test_seeds():
    engine = make_engine()
    same = [submit_ids(engine, PROMPT, seeded(seed=7)) for _ in range(2)]
    others = [submit_ids(engine, PROMPT, seeded(seed=seed)) for seed in (8, 9, 2**32 - 1)]
    run_to_end(engine)
    assert tokens_of(same[0]) == tokens_of(same[1])
    found = {tuple(tokens_of(request)) for request in (same[0], *others)}
    assert len(found) == 4


def test_requests_without_a_seed_differ_and_repeat_with_the_engine_s():
    def run(seed):
        engine = make_engine(seed=seed)
        for _ in range(3):
            submit_ids(engine, PROMPT, seeded(seed=None))
        run_to_end(engine)
        return [tokens_of(request) for request in engine.requests]

    first = run(seed=1)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert run(seed=1) == first
    assert run(seed=2) != first


def test_top_k_of_one_and_a_cold_temperature_are_greedy():
    greedy = tokens_of(serve(seeded(temperature=0.0)))
    assert tokens_of(serve(seeded(top_k=1))) == greedy
    assert tokens_of(serve(seeded(min_p=1.0))) == greedy
    assert tokens_of(serve(seeded(top_p=1e-6))) == greedy
    assert tokens_of(serve(seeded())) != greedy


# Ends.


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_end_tokens_end_and_min_tokens_holds_them_off(temperature):
    params = seeded(temperature=temperature, ignore_eos=False)
    free = tokens_of(serve(params))
    end = free[3]
    position = free.index(end)
    stopped = serve(params, eos=(end,), before=1)
    assert tokens_of(stopped) == free[: position + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    held = serve(replace(params, min_tokens=position + 3), eos=(end,), before=1)
    assert tokens_of(held)[:position] == free[:position]
    assert end not in tokens_of(held)[: position + 3]
    assert held.num_output_tokens >= position + 3
    just_held = serve(replace(params, min_tokens=position + 1), eos=(end,))
    assert tokens_of(just_held)[:position] == free[:position]
    assert tokens_of(just_held)[position] != end
    just_free = serve(replace(params, min_tokens=position), eos=(end,))
    assert tokens_of(just_free) == free[: position + 1]
    ignored = serve(replace(params, ignore_eos=True), eos=(end,))
    assert tokens_of(ignored) == free


def test_stop_token_ids():
    params = seeded(temperature=0.0)
    free = tokens_of(serve(params))
    request = serve(replace(params, stop_token_ids=[511, free[5]]))
    assert tokens_of(request) == free[: free.index(free[5]) + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", free[5])
    held = serve(replace(params, stop_token_ids=[free[0]], min_tokens=4))
    assert free[0] not in tokens_of(held)[:4]


def test_min_tokens_with_mates_that_have_none():
    """Suppression is a row's own."""
    params = seeded(temperature=0.0)
    free = tokens_of(serve(params))
    engine = make_engine()
    held = submit_ids(engine, PROMPT, replace(params, stop_token_ids=[free[0]], min_tokens=3))
    other = submit_ids(engine, PROMPT, params)
    run_to_end(engine)
    assert tokens_of(other) == free
    assert tokens_of(held)[0] != free[0]


# Log-probabilities.


def log_softmax(request):
    """Of the oracle, at each output position, in float64."""
    model = loaded("tiny")
    ids = [*request.prompt_token_ids, *request.output_token_ids][:-1]
    values = logits(model.config, model.parameters, ids)[request.num_prompt_tokens - 1 :]
    values = values.astype(np.float64)
    values -= values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_unfiltered_model(num, temperature):
    params = seeded(temperature=temperature, logprobs=num)
    request = serve(params, before=1, after=1, max_num_batched_tokens=7)
    expected = log_softmax(request)
    assert len(request.sequence.logprobs) == NUM_TOKENS == len(expected)
    for token, found, row in zip(
        request.output_token_ids, request.sequence.logprobs, expected, strict=True
    ):
        assert found.logprob == pytest.approx(row[token], abs=LOGPROB_TOLERANCE)
        assert found.rank == 1 + (row > row[token]).sum()
        assert len(found.top_ids) == len(found.top_logprobs) == num
        assert list(found.top_ids) == np.argsort(-row)[:num].tolist()
        np.testing.assert_allclose(
            found.top_logprobs, row[list(found.top_ids)], atol=LOGPROB_TOLERANCE, rtol=0
        )
    ranks = [found.rank for found in request.sequence.logprobs]
    assert (max(ranks) == 1) == (temperature == 0.0)


def test_asking_for_logprobs_changes_no_token(alone):
    assert tokens_of(serve(seeded(logprobs=3), before=2)) == alone


def test_a_mate_s_logprobs_are_its_own():
    engine = make_engine()
    with_three = submit_ids(engine, PROMPT, seeded(logprobs=3))
    without = submit_ids(engine, PROMPT, seeded(seed=5))
    run_to_end(engine)
    output = engine.output(with_three).outputs[0]
    assert [len(position) in (3, 4) for position in output.logprobs] == [True] * NUM_TOKENS
    assert output.cumulative_logprob == pytest.approx(
        sum(entry.logprob for entry in with_three.sequence.logprobs)
    )
    assert without.sequence.logprobs == []
    assert engine.output(without).outputs[0].logprobs is None


def test_settings_are_data_and_build_no_executables():
    real = shared_real("tiny")
    serve(seeded(logprobs=1))
    serve(seeded())
    serve(seeded(temperature=0.0))
    before = set(real.executables)
    for values in ({"top_k": 4}, {"top_p": 0.3}, {"min_p": 0.4}, {"temperature": 0.1}):
        serve(seeded(**values))
        serve(seeded(logprobs=7, **values))
    serve(seeded(temperature=0.0, seed=None))
    assert set(real.executables) == before
    assert {variant for _, variant in before} == set(Variant)
