"""The law of tokens holds for a quantised cache too: K and V of a token are rounded once, when they
are written, whatever the chunk, the row or the block; so every policy reads the same numbers.

Float32 activations on the tiny model, unwritten scales NaN. What is expected is the same request
alone in a fresh engine with the same cache.
"""

from functools import cache

import pytest
from real_builders import loaded, make_real, real_engine
from real_workload import MODEL_LEN, NUM_HOST_SLOTS, NUM_ROWS, NUM_TIGHT_SLOTS, WORKLOAD, submit

from paxserve.batching.textbook import Textbook
from paxserve.executor.real import Real
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain

NUMBERS = [i for i, ask in enumerate(WORKLOAD) if ask.params.n == 1 and not ask.params.beam_width]
UNDER = {
    "chunks": ({}, {}),
    "whole prompts": ({"batching": Textbook()}, {}),
    "recompute": ({"prefix_cache": HashChain()}, {"preempt_every_steps": 3}),
    "swap": (
        {"preemption": Swap()},
        {"preempt_every_steps": 2, "num_host_blocks": NUM_HOST_SLOTS // 16},
    ),
}


@cache
def executor(kv_cache_dtype: str) -> Real:
    return make_real(
        loaded("tiny"),
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=24,
        max_model_len=MODEL_LEN,
        num_blocks=1 + 5 * MODEL_LEN // 16,
        num_host_blocks=NUM_HOST_SLOTS // 16,
        token_buckets=(24,),
    )


def serve(kv_cache_dtype, numbers, policies, **sizes):
    real = executor(kv_cache_dtype)
    budget = {"max_num_batched_tokens": MODEL_LEN} if "batching" in policies else {}
    if budget:  # whole prompts need a shape of their own
        real = make_real(
            loaded("tiny"),
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=NUM_ROWS,
            max_model_len=MODEL_LEN,
            token_buckets=(MODEL_LEN,),
            **budget,
        )
    engine = real_engine(real, loaded("tiny"), policies=policies, **sizes)
    requests = {number: submit(engine, number) for number in numbers}
    while engine.has_work:
        engine.step()
    return engine, {n: list(request.output_token_ids) for n, request in requests.items()}


@cache
def alone(kv_cache_dtype, number):
    _, found = serve(kv_cache_dtype, [number], {})
    return found[number]


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_every_policy_gives_the_tokens_of_the_request_alone(kv_cache_dtype, under):
    policies, sizes = UNDER[under]
    if "batching" not in policies:
        sizes = {"num_blocks": 1 + NUM_TIGHT_SLOTS // 16, **sizes}
    engine, found = serve(kv_cache_dtype, NUMBERS, policies, **sizes)
    assert found == {number: alone(kv_cache_dtype, number) for number in NUMBERS}
    num_preempted = sum(request.num_preemptions for request in engine.requests)
    assert (num_preempted > 0) == ("preempt_every_steps" in sizes or under == "chunks")
    assert (sum(step.num_swapped_in for step in engine.steps) > 0) == (under == "swap")


def test_rounding_changes_numbers_but_not_what_they_mean():
    """The cache is a quarter of float32 and its scales; some token is another, most are not."""
    real, wide = executor("int8"), make_real(loaded("tiny"))
    per_block = [sum(kv[0].nbytes for kv in one.kv_blocks) for one in (real, wide)]
    num_layers, head_dim = 2, 16
    assert per_block[1] == num_layers * 2 * 2 * 16 * head_dim * 4
    assert per_block[0] == num_layers * 2 * 2 * 16 * (head_dim + 4)
    narrow = [token for number in NUMBERS for token in alone("int8", number)]
    exact = [token for number in NUMBERS for token in alone("auto", number)]
    num_equal = sum(a == b for a, b in zip(narrow, exact, strict=True))
    assert len(exact) / 2 < num_equal
