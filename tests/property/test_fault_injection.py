"""The k-th allocation fails, for every k until none does: invariants hold, every request ends."""

import itertools

import pytest
from axes import combinations, name_of, policies
from builders import Checked, make_engine, make_limits, prompt_ids, submit, tokens_alone
from invariants import check, check_idle

from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.kv.host_pool import HostPool
from paxserve.placement.paged import Paged
from paxserve.preemption.recompute import Recompute
from paxserve.preemption.swap import Swap
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
@pytest.mark.parametrize("first", [1, 3, 5])
def test_no_allocation_succeeds_any_more(batching, reservation, placement, first):
    engine = serve(lambda call: call >= first, batching, reservation, placement)
    assert outcomes(engine) >= 1


MIXED = [  # prompt, max_tokens, and what of samples and beams
    (4, 5, {"n": 2, "temperature": 1.0, "seed": 1}),
    (4, 4, {}),
    (5, 4, {"beam_width": 2}),
    (6, 6, {}),
    (4, 3, {"n": 3, "temperature": 1.0, "seed": 2}),
    (1, 5, {"beam_width": 3}),
]


class Stingy(HostPool):
    """A host pool that says at the k-th question of a step that nothing is free, unless k is 0."""

    def __init__(self, num_blocks, k):
        super().__init__(num_blocks)
        self.k, self.num_asked, self.counts = k, 0, False

    @property
    def num_free(self):
        self.num_asked += self.counts
        return 0 if self.counts and self.num_asked == self.k else len(self._free)


def serve_mixed(refuses, batching, cache, preemption, host_k=0):
    """Samples and beams of two prompts in a pool that they fill; a preemption every third step."""
    limits = make_limits(
        block_size=2,
        num_blocks=13,
        max_model_len=12,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        num_host_blocks=8 if preemption.swaps else 0,
        preempt_every_steps=3,
    )
    engine = make_engine(
        limits,
        batching=batching,
        prefix_cache=cache,
        preemption=preemption,
        placement=Checked(Paged(), refuses),
    )
    batch = engine.scheduler.batch
    batch.host_pool = Stingy(limits.num_host_blocks, host_k)
    for number, (length, max_tokens, shape) in enumerate(MIXED):
        submit(engine, prompt_ids(length, number % 2), max_tokens=max_tokens, **shape)
    num_steps = 0
    while engine.has_work:
        batch.host_pool.counts = True
        engine.step()
        batch.host_pool.counts = False
        check(engine)
        num_steps += 1
        assert num_steps < 500, "no progress"
    check_idle(engine)
    return engine, batch.host_pool.num_asked


def outputs(engine):
    return [[s.token_ids for s in request.sequences] for request in engine.requests]


def wrong_ones(engine, expected):
    """Requests whose tokens are not those expected; each of these says why it failed."""
    wrong = [
        r for r, e, g in zip(engine.requests, expected, outputs(engine), strict=True) if e != g
    ]
    assert all(r.finish_reason is FinishReason.ERROR and r.error for r in wrong)
    return wrong


@pytest.mark.parametrize("batching", [ChunkedPrefill(), Textbook(), Static()], ids=name_of)
@pytest.mark.parametrize("cache", policies("prefix_cache"), ids=name_of)
@pytest.mark.parametrize("preemption", [Recompute(), Swap()], ids=name_of)
def test_one_allocation_fails_among_groups_shared_prefixes_and_swaps(batching, cache, preemption):
    chosen = batching, cache, preemption
    undisturbed, num_questions = serve_mixed(lambda call: False, *chosen)
    num_calls = undisturbed.scheduler.batch.pool.free_space.num_calls
    expected = outputs(undisturbed)
    assert {r.finish_reason for r in undisturbed.requests} == {FinishReason.LENGTH}
    assert num_calls > 30
    for k in range(1, num_calls + 1):
        engine, _ = serve_mixed(lambda call, k=k: call == k, *chosen)
        assert len(wrong_ones(engine, expected)) <= 1, k
    if preemption.swaps:
        assert num_questions >= 3
        for k in range(1, num_questions + 1):
            engine, _ = serve_mixed(lambda call: False, *chosen, host_k=k)
            assert wrong_ones(engine, expected) == [], k
