"""The core law: a request's tokens are the same under every combination of policies and sizes.

The scripted executor makes each token from everything that lies in the KV slots of its context, so
a wrong table, position, chunk or resume changes tokens.
"""

import itertools

import pytest
from axes import combinations, name_of, policies
from builders import (
    make_engine,
    make_limits,
    prompt_ids,
    run_to_end,
    submit,
    tokens_alone,
    with_room,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from invariants import check, check_idle

from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.placement.buddy import Buddy

MAX_MODEL_LEN = 22


def lengths_around_blocks(block_size):
    multiples = [block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1]
    return st.sampled_from(sorted({n for n in [1, *multiples] if 1 <= n <= 14}))


@st.composite
def workloads(draw):
    """Limits, and requests as (prompt, max_tokens, seed or None, steps before it arrives)."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    rows = draw(st.integers(1, 5))
    tight = -(-MAX_MODEL_LEN // block_size)
    limits = {
        "block_size": block_size,
        "max_num_seqs": rows,
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": 1 + draw(st.sampled_from([tight, tight + 1, 2 * tight, 10 * tight])),
        "max_num_batched_tokens": draw(st.integers(rows, 2 * MAX_MODEL_LEN)),
    }
    salts = st.just(0) if draw(st.booleans()) else st.integers(0, 3)  # identical prompts or not
    requests = draw(
        st.lists(
            st.tuples(
                st.builds(prompt_ids, lengths_around_blocks(block_size), salts),
                st.integers(1, 8),
                st.one_of(st.none(), st.integers(0, 2**32 - 1)),
                st.sampled_from([0, 0, 0, 1, 4]),
            ),
            min_size=1,
            max_size=7,
        )
    )
    return limits, requests


def serve(requests, limits, **chosen):
    """Serve requests that arrive with pauses between them, and check every invariant."""
    engine = make_engine(limits, **chosen)
    served = []
    for token_ids, max_tokens, seed, pause in requests:
        sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
        for _ in range(pause):
            engine.step()
            check(engine)
        served.append(submit(engine, token_ids, max_tokens=max_tokens, **sampling))
    run_to_end(engine)
    check_idle(engine)
    return engine, served


@pytest.mark.parametrize(
    ("batching", "reservation", "placement"), combinations("batching", "reservation", "placement")
)
@given(workload=workloads())
@settings(max_examples=40)
def test_policies_and_sizes_do_not_change_a_token(batching, reservation, placement, workload):
    sizes, requests = workload
    if batching.whole_prompts:
        budget = max(sizes["max_num_batched_tokens"], MAX_MODEL_LEN)
        sizes = sizes | {"max_num_batched_tokens": budget}
    _, served = serve(
        requests,
        with_room(placement, make_limits(**sizes)),
        batching=batching,
        reservation=reservation,
        placement=placement,
    )
    for request, (token_ids, max_tokens, seed, _) in zip(served, requests, strict=True):
        assert list(request.output_token_ids) == tokens_alone(token_ids, max_tokens, seed=seed or 0)
        assert request.finish_reason == "length"
    event(f"preempted: {any(r.num_preemptions for r in served)}")


def test_a_run_that_cannot_grow_is_left_for_a_longer_one():
    """44 blocks are runs of 32, 8 and 4. A first chunk of 1 would begin in the 4 and again there
    after each preemption, so the whole prompt decides where a contiguous table lies.
    """
    limits = make_limits(block_size=1, num_blocks=45, max_num_batched_tokens=1, max_num_seqs=1)
    engine = make_engine(limits, placement=Buddy())
    request = submit(engine, prompt_ids(1), max_tokens=12)
    run_to_end(engine, max_steps=100)
    assert list(request.output_token_ids) == tokens_alone(prompt_ids(1), 12)
    assert request.num_preemptions == 2  # out of the 4 and out of the 8


def test_one_request_alone_is_what_the_law_compares_with():
    engine = make_engine(make_limits(max_model_len=64))
    request = submit(engine, prompt_ids(9), max_tokens=20)
    run_to_end(engine)
    assert list(request.output_token_ids) == tokens_alone(prompt_ids(9), 20)
    assert len(set(request.output_token_ids)) == 20  # and not a constant


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_chunks_of_every_size_give_the_same_tokens(length):
    for budget in range(1, length + 1):
        limits = make_limits(max_num_seqs=1, max_num_batched_tokens=budget)
        engine = make_engine(limits, batching=ChunkedPrefill())
        request = submit(engine, prompt_ids(length), max_tokens=6)
        assert run_to_end(engine) == -(-length // budget) + 5 + 1  # chunks, decodes, release
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(length), 6)


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
def test_order_of_arrival_does_not_change_a_token(batching):
    lengths = [1, 3, 4, 9]
    limits = make_limits(num_blocks=9, max_num_seqs=3)
    for order in itertools.permutations(range(len(lengths))):
        engine = make_engine(limits, batching=batching)
        served = {
            i: submit(engine, prompt_ids(lengths[i], salt=i), max_tokens=5 + i) for i in order
        }
        run_to_end(engine)
        for i, request in served.items():
            expected = tokens_alone(prompt_ids(lengths[i], salt=i), 5 + i)
            assert list(request.output_token_ids) == expected


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
def test_identical_prompts_give_identical_tokens_side_by_side(batching):
    limits = make_limits(num_blocks=11, max_num_seqs=4)
    engine = make_engine(limits, batching=batching)
    served = [submit(engine, prompt_ids(8), max_tokens=8) for _ in range(6)]
    run_to_end(engine)
    assert {tuple(r.output_token_ids) for r in served} == {tuple(tokens_alone(prompt_ids(8), 8))}


def test_two_equal_seeds_side_by_side_draw_alike_and_others_do_not():
    engine = make_engine()
    served = [
        submit(engine, prompt_ids(5), max_tokens=8, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    run_to_end(engine)
    first, second, third = (list(r.output_token_ids) for r in served)
    assert first == second == tokens_alone(prompt_ids(5), 8, seed=1)
    assert third == tokens_alone(prompt_ids(5), 8, seed=2) != first


@pytest.mark.parametrize("preempt_after", range(1, 8))
def test_preemption_after_any_output_changes_neither_tokens_nor_seed(preempt_after):
    engine = make_engine()
    params = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
    request = submit(engine, prompt_ids(5), **params)
    for _ in range(preempt_after):
        engine.step()
    num_lost = request.sequence.num_computed_tokens
    engine.scheduler.batch.preempt(request, num_lost_tokens=num_lost, method="recompute")
    run_to_end(engine)
    assert list(request.output_token_ids) == tokens_alone(prompt_ids(5), 8, seed=5)
    assert (request.num_preemptions, request.num_recomputed_tokens) == (1, num_lost)
    assert num_lost == 5 + preempt_after - 1
