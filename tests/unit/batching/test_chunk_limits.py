"""The knobs of the two policies that split prompts, and the memory that goes with their chunks."""

import pytest
from builders import make_engine, make_limits, make_request, prompt_ids, submit

from paxserve.batching import split
from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.running_first import RunningFirst
from paxserve.preemption import Method, VictimView
from paxserve.preemption.by_width import ByWidth
from paxserve.reservation.prompt import Prompt

KNOBS = ("long_prefill_token_threshold", "max_num_partial_prefills")
per_policy = pytest.mark.parametrize("policy", [ChunkedPrefill, RunningFirst])


def steps_of(batching, lengths, *, outputs=3, **chosen):
    """Tokens of each request in each step."""
    engine = make_engine(make_limits(), batching=batching, **chosen)
    for salt, length in enumerate(lengths):
        submit(engine, prompt_ids(length, salt), max_tokens=outputs)
    while engine.has_work:
        engine.step()
    return [
        {row.sequence_id: row.num_tokens for row in plan.rows} for plan in engine.executor.plans
    ]


@per_policy
def test_without_limits_a_prompt_takes_what_the_budget_has(policy):
    assert steps_of(policy(), [9, 7])[0] == {0: 9, 1: 7}


@per_policy
def test_a_long_prompt_goes_in_by_the_threshold_beside_others(policy):
    steps = steps_of(policy(long_prefill_token_threshold=4), [9, 2, 4])
    assert steps[:3] == [{0: 4, 1: 2, 2: 4}, {0: 4, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}]


@per_policy
def test_prompts_under_way_are_limited_and_whole_ones_are_not_among_them(policy):
    batching = policy(long_prefill_token_threshold=4, max_num_partial_prefills=1)
    steps = steps_of(batching, [9, 3, 6, 2])
    # 1 enters whole beside 0; 2 would be a second one under way, and 3 does not overtake it.
    assert steps[:4] == [
        {0: 4, 1: 3},
        {0: 4, 1: 1},
        {0: 1, 1: 1, 2: 4, 3: 2},
        {0: 1, 2: 2, 3: 1},
    ]


@per_policy
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("value", [-1, 2**31, 1.0, float("nan"), True, "8", None])
def test_what_is_no_count_is_refused_by_name(policy, knob, value):
    with pytest.raises(ValueError, match=rf"{knob} must be a whole number .* got {value!r}"):
        policy(**{knob: value})


@pytest.mark.parametrize(("ended", "going_on"), [(1, 3), (3, 1)])
def test_whether_a_request_decodes_is_told_by_the_sequences_that_go_on(ended, going_on):
    request = make_request(3, n=2, temperature=1.0)
    first, second = request.sequences
    first.num_remaining_tokens, second.num_remaining_tokens = ended, going_on
    request.live.remove(first)
    assert split([request]) == (([request], []) if going_on == 1 else ([], [request]))


def test_reserving_the_prompt_holds_all_of_it_with_the_first_chunk_and_no_more():
    limits = make_limits(max_num_batched_tokens=4)
    engine = make_engine(limits, batching=ChunkedPrefill(), reservation=Prompt())
    request = submit(engine, prompt_ids(10), max_tokens=4)
    held = []
    while not request.finish_reason:
        engine.step()
        held.append(len(request.sequence.block_table))
    assert held == [3, 3, 3, 3, 3, 4]  # 10 tokens in blocks of 4, then slots 11, 12 and 13


def test_groups_are_swapped_and_single_sequences_recomputed():
    view = VictimView(num_computed_tokens=8, num_blocks=2, num_free_host_blocks=9)
    assert ByWidth().choose(make_request(3), view) is Method.RECOMPUTE
    assert ByWidth().choose(make_request(3, n=2, temperature=1.0), view) is Method.SWAP
