"""What a request finds when it enters: cached blocks, memory as gates see it, host blocks."""

import pytest
from builders import (
    Dictated,
    make_engine,
    make_limits,
    prompt_ids,
    run_to_end,
    submit,
    tokens_alone,
)
from invariants import check

from paxserve.batching import Grant, Reason
from paxserve.planning import StepInMaking
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.radix import Radix
from paxserve.request import FinishReason, State


class Watching:
    """A gate that lets everyone in and keeps what it saw."""

    def __init__(self, why=None):
        self.seen, self.why = [], why

    def refusal(self, state, request, memory):
        self.seen.append(memory)
        return self.why


def grant(engine, request, num_tokens):
    scheduler = engine.scheduler
    step = StepInMaking(batch=scheduler.batch, policies=scheduler.policies, events=engine.events)
    return step.answer(Grant(request, num_tokens))


@pytest.mark.parametrize("cache", [HashChain("planning"), HashChain("after_step"), Radix()])
@pytest.mark.parametrize(("length", "num_hit"), [(7, 6), (8, 6), (9, 8)])
def test_a_hit_never_covers_the_last_token_since_it_must_be_computed_to_sample(
    cache, length, num_hit
):
    engine = make_engine(make_limits(block_size=2), prefix_cache=cache)
    for _ in range(2):
        request = submit(engine, prompt_ids(length), max_tokens=3)
        run_to_end(engine)
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(length), 3)
    assert (request.num_cached_tokens, request.num_hit_tokens) == (num_hit, num_hit)


def test_tokens_that_are_not_computed_yet_are_not_published():
    limits = make_limits(block_size=2, max_num_batched_tokens=5)
    engine = make_engine(limits, prefix_cache=HashChain("planning"))
    request = submit(engine, prompt_ids(9), max_tokens=3)
    num_indexed = []
    for _ in range(4):
        engine.step()
        num_indexed.append(len(engine.scheduler.batch.pool.index))
    assert num_indexed == [2, 4, 5, 5]
    assert request.sequence.num_published_blocks == 5


@pytest.mark.parametrize("cache", [HashChain("planning"), HashChain("after_step")])
def test_a_block_that_decodes_filled_is_found_by_a_prompt_that_goes_on_from_it(cache):
    engine = make_engine(make_limits(block_size=2), prefix_cache=cache)
    first = submit(engine, prompt_ids(3), max_tokens=4)
    run_to_end(engine)
    second = submit(engine, first.sequence.token_ids, max_tokens=2)
    run_to_end(engine)
    assert second.num_cached_tokens == 6  # of 7 known tokens; the last one was never computed
    assert list(second.output_token_ids) == tokens_alone(first.sequence.token_ids, 2)


def test_gates_see_the_memory_without_the_cached_blocks_that_the_request_takes():
    gate = Watching()
    engine = make_engine(
        make_limits(block_size=2, num_blocks=9), prefix_cache=HashChain(), gates=(gate,)
    )
    submit(engine, prompt_ids(4), max_tokens=1)
    run_to_end(engine)
    request = submit(engine, prompt_ids(7), max_tokens=1)
    assert engine.scheduler.batch.pool.num_cached == 2
    assert grant(engine, request, 2).num_tokens == 2
    seen = gate.seen[-1]
    assert (seen.num_usable, seen.num_free, seen.num_cached_tokens) == (8, 6, 4)
    assert (seen.num_needed, seen.num_needed_for_all) == (1, 2)


def test_gates_see_who_runs_and_who_of_them_entered_in_this_step():
    gate = Watching()
    engine = make_engine(gates=(gate,))
    first, second = (submit(engine, prompt_ids(4, salt), max_tokens=9) for salt in range(2))
    engine.step()
    submit(engine, prompt_ids(4, 2))
    engine.step()
    assert [memory.running for memory in gate.seen] == [(), (first,), (first, second)]
    assert [set(memory.newcomers) for memory in gate.seen] == [set(), {first}, set()]


def test_what_a_gate_holds_back_is_as_if_it_had_not_been_looked_at():
    engine = make_engine(
        make_limits(block_size=2), prefix_cache=HashChain(), gates=(Watching("not today"),)
    )
    request = submit(engine, prompt_ids(5), n=3, temperature=1.0, max_tokens=2)
    assert grant(engine, request, 7).refused is Reason.GATE
    assert request.state is State.WAITING
    for sequence in request.sequences:
        assert (sequence.num_computed_tokens, sequence.num_known_tokens) == (0, 5)
        assert (sequence.source, sequence.block_table, sequence.row) == (None, [], -1)
    check(engine)


def test_blocks_of_a_swapped_group_come_back_once_for_all_who_share_them():
    gate = Watching()
    engine = make_engine(
        make_limits(block_size=2, num_host_blocks=8), preemption=Swap(), gates=(gate,)
    )
    request = submit(engine, prompt_ids(5), n=3, temperature=1.0, max_tokens=4)
    engine.step()
    engine.step()
    engine.scheduler.preempt(request)
    engine.step()
    assert gate.seen[-1].num_needed == 3  # when it came first
    engine.step()
    assert request.state is State.RUNNING
    assert gate.seen[-1].num_needed == 2 + 3 + 3  # two shared, the third of each, and a fourth
    plan = engine.executor.plans[-1]
    assert len({copy.source for copy in plan.swap_in}) == len(plan.swap_in) == 2 + 3


def test_host_blocks_are_free_again_only_for_the_next_step():
    """What comes back is read in the step in which it is planned, after others were swapped out."""
    engine = make_engine(make_limits(block_size=2, num_host_blocks=2), preemption=Swap())
    first = submit(engine, prompt_ids(3), max_tokens=6)
    second = submit(engine, prompt_ids(3, 1), max_tokens=6)
    engine.step()
    engine.scheduler.preempt(first)
    engine.step()
    assert first.sequence.host_blocks
    engine.scheduler.preempt(second)  # in the step in which the first comes back
    engine.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    assert second.sequence.host_blocks == []
    run_to_end(engine)
    assert list(first.output_token_ids) == tokens_alone(prompt_ids(3), 6)
    assert list(second.output_token_ids) == tokens_alone(prompt_ids(3, 1), 6)


@pytest.mark.parametrize("cache", [HashChain("planning"), HashChain("after_step"), Radix()])
def test_what_a_request_without_finite_logits_wrote_is_not_found(cache):
    engine = make_engine(executor=Dictated([[5], [-1], [5, 5]]), vocab_size=9, prefix_cache=cache)
    for i, reason in enumerate([FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]):
        prompt = list(range(9 if i else 5))
        request = submit(engine, prompt, max_tokens=1 + (i == 2))
        run_to_end(engine)
        assert (request.finish_reason, request.num_cached_tokens) == (reason, 4 * (i == 1))


def test_a_request_ends_as_its_first_sample_did():
    outputs = {(0, 0): [1], (0, 1): [2, 2], (1, 0): [2, 2], (1, 1): [1]}
    for number, reason in enumerate([FinishReason.STOP, FinishReason.LENGTH]):
        told = [outputs[number, 0], outputs[number, 1]]
        engine = make_engine(executor=Dictated(told), vocab_size=9, eos_token_ids=[1])
        request = submit(engine, [4, 5], n=2, temperature=1.0, max_tokens=2)
        run_to_end(engine)
        assert request.finish_reason is reason
