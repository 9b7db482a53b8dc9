"""The k-th allocation fails, for every k until none does: invariants hold, every request ends."""

import itertools

import pytest
from axes import combinations
from builders import Checked, make_engine, make_limits, prompt_ids, submit, tokens_alone
from invariants import check, check_idle

from paxserve.request import FinishReason, State

LENGTHS = [(4, 6), (1, 9), (5, 3), (8, 8), (3, 1)]  # prompt, max_tokens
LIMITS = make_limits(
    block_size=2, num_blocks=11, max_model_len=16, max_num_seqs=3, max_num_batched_tokens=16
)


def serve(refuses, batching, reservation, placement):
    engine = make_engine(
        LIMITS,
        batching=batching,
        reservation=reservation,
        placement=Checked(placement, refuses),
    )
    for salt, (length, max_tokens) in enumerate(LENGTHS):
        submit(engine, prompt_ids(length, salt=salt), max_tokens=max_tokens)
    num_steps = 0
    while engine.has_work:
        engine.step()
        check(engine)
        num_steps += 1
        assert num_steps < 400, "no progress"
    check_idle(engine)
    return engine


def outcomes(engine):
    """Checks each request's end; returns how many failed."""
    for salt, request in enumerate(engine.requests):
        length, max_tokens = LENGTHS[salt]
        expected = tokens_alone(prompt_ids(length, salt=salt), max_tokens)
        assert request.state is State.FINISHED
        if request.finish_reason is FinishReason.LENGTH:
            assert list(request.output_token_ids) == expected
        else:
            assert request.finish_reason is FinishReason.ERROR
            assert request.error
            num_output = request.num_output_tokens
            assert list(request.output_token_ids) == expected[:num_output]
    return sum(r.finish_reason is FinishReason.ERROR for r in engine.requests)


@pytest.mark.parametrize(
    ("batching", "reservation", "placement"), combinations("batching", "reservation", "placement")
)
def test_one_allocation_fails(batching, reservation, placement):
    chosen = batching, reservation, placement
    num_calls = serve(lambda call: False, *chosen).scheduler.batch.pool.free_space.num_calls
    assert num_calls >= len(LENGTHS)
    num_failed = []
    for k in itertools.count(1):
        engine = serve(lambda call, k=k: call == k, *chosen)
        num_failed.append(outcomes(engine))
        if engine.scheduler.batch.pool.free_space.num_calls < k:
            break  # the run never came to a k-th allocation
    assert len(num_failed) > num_calls // 2
    assert num_failed[-1] == 0
    assert max(num_failed) <= 1  # one refusal costs at most the one request that stood alone


@pytest.mark.parametrize(
    ("batching", "reservation", "placement"), combinations("batching", "reservation", "placement")
)
@pytest.mark.parametrize("first", [1, 3, 6])
def test_no_allocation_succeeds_any_more(batching, reservation, placement, first):
    engine = serve(lambda call: call >= first, batching, reservation, placement)
    assert outcomes(engine) >= 1
