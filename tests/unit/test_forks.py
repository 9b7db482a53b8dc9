"""How the sequences of a request share what they have in common."""

import pytest
from builders import make_intake, make_limits, make_request
from hypothesis import given
from hypothesis import strategies as st

from paxserve.forks import num_grantable, plan_forks, reads_again, spread
from paxserve.request import token_array


def group(*token_lists, computed=()):
    """A request whose sequences know these tokens, the first of which are computed."""
    intake = make_intake(make_limits(max_num_seqs=8))
    request = make_request(1, intake=intake, n=len(token_lists), temperature=1.0)
    for i, (sequence, tokens) in enumerate(zip(request.sequences, token_lists, strict=True)):
        sequence.token_ids[:] = token_array(tokens)
        sequence.num_computed_tokens = computed[i] if computed else 0
        sequence.num_remaining_tokens = len(tokens) - sequence.num_computed_tokens
    return request


def plan(request, block_size=2):
    plan_forks(request, block_size=block_size)
    live = request.live
    return [(s.num_computed_tokens, s.source and live.index(s.source)) for s in live]


def claims(request, num_tokens):
    return [
        (request.live.index(claim.sequence), claim.num_tokens)
        for claim in spread(request, num_tokens)
    ]


def test_samples_without_output_share_all_but_the_last_token_of_the_prompt_and_read_it_again():
    request = group([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert plan(request) == [(0, None), (4, 0), (4, 0)]
    assert [reads_again(s) for s in request.live] == [False, True, True]
    assert request.num_remaining_tokens == 5 + 1 + 1


def test_samples_with_output_share_the_whole_blocks_before_they_part():
    request = group([1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [1, 2, 3, 9, 8, 7])
    assert plan(request) == [(0, None), (2, 0), (4, 1)]
    assert [reads_again(s) for s in request.live] == [False, False, False]


def test_the_last_token_of_either_is_never_shared_where_they_differ_in_length():
    """Both must compute it: it may lie in a block that goes on differently."""
    assert plan(group([1, 2, 3, 4], [1, 2, 3, 4, 5])) == [(0, None), (2, 0)]
    assert plan(group([1, 2, 3, 4, 5], [1, 2, 3, 4])) == [(0, None), (2, 0)]
    assert plan(group([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5])) == [(0, None), (4, 0)]


def test_sequences_without_a_block_in_common_have_no_source():
    assert plan(group([1, 2, 3], [1, 9, 3], [1, 8, 3])) == [(0, None), (0, None), (0, None)]
    assert plan(group([1], [1])) == [(0, None), (0, None)]


def test_of_two_equal_sources_the_earlier_one_gives():
    assert plan(group([1, 2, 3], [1, 2, 4], [1, 2, 5])) == [(0, None), (2, 0), (2, 0)]


def test_an_ended_sample_is_no_source():
    request = group([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6])
    request.live.remove(request.sequences[0])
    assert plan(request) == [(0, None), (2, 0)]


def test_a_grant_of_all_lets_everyone_sample_and_less_lets_nobody():
    request = group([1, 2, 3, 4, 5], [1, 2, 3, 9, 5])
    plan_forks(request, block_size=2)  # 5 and 3 tokens are left
    assert claims(request, 8) == [(0, 5), (1, 3)]
    assert claims(request, 6) == [(0, 4), (1, 2)]
    assert claims(request, 5) == [(0, 4), (1, 1)]
    assert claims(request, 3) == [(0, 3)]


def test_one_live_sequence_gets_the_whole_grant():
    request = group([1, 2, 3], [1, 2, 3])
    request.live.pop()
    assert claims(request, 3) == [(0, 3)]
    assert claims(request, 1) == [(0, 1)]


@pytest.mark.parametrize(
    ("asked", "budget", "largest", "granted"),
    [
        (8, 8, 20, 8),  # all
        (9, 9, 20, 8),  # never more than that
        (8, 7, 20, 0),  # all or nothing, where a step could hold all
        (7, 7, 20, 6),  # short of all, the two last tokens wait for each other
        (6, 6, 20, 6),
        (8, 5, 7, 5),  # no step holds all of it: it is split
        (8, 7, 7, 6),
        (3, 2, 20, 0),
    ],
)
def test_how_much_of_a_group_is_granted(asked, budget, largest, granted):
    request = group([1, 2, 3, 4, 5], [1, 2, 3, 9, 5])
    plan_forks(request, block_size=2)
    assert num_grantable(request, asked, num_budget=budget, largest_step=largest) == granted


def test_how_much_of_a_single_sequence_is_granted():
    request = make_request(5)
    asked = [num_grantable(request, n, num_budget=4, largest_step=9) for n in (1, 4, 5, 6)]
    assert asked == [1, 4, 0, 0]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


@given(
    token_lists=st.lists(TOKENS, min_size=1, max_size=4),
    prompt=TOKENS,
    block_size=st.integers(1, 3),
    data=st.data(),
)
def test_claims_sum_to_the_grant_and_sources_are_ahead(token_lists, prompt, block_size, data):
    request = group(*[[*prompt, *tokens] for tokens in token_lists])
    plan_forks(request, block_size=block_size)
    for sequence in request.live[1:]:
        if sequence.source is not None:
            num_shared = sequence.num_computed_tokens
            assert sequence.token_ids[:num_shared] == sequence.source.token_ids[:num_shared]
            assert num_shared % block_size == 0 or reads_again(sequence)
        assert sequence.num_remaining_tokens >= 1
    while any(s.num_remaining_tokens for s in request.live):
        remaining = request.num_remaining_tokens
        asked = data.draw(st.integers(1, remaining))
        num = num_grantable(request, asked, num_budget=remaining, largest_step=remaining)
        if not num:  # all that is left is where they sample
            num = remaining
        made = spread(request, num)
        assert sum(claim.num_tokens for claim in made) == num
        assert len({claim.sequence for claim in made}) == len(made)
        for sequence, num_tokens in made:  # in this order, and sources before those they give to
            source = sequence.source
            if source is not None:
                needed = sequence.num_computed_tokens + reads_again(sequence)
                assert source.num_computed_tokens >= needed
                assert num_tokens == 1 or not reads_again(sequence)
                sequence.source = None
            sequence.num_computed_tokens += num_tokens
            sequence.num_remaining_tokens -= num_tokens
        sampling = [s for s in request.live if not s.num_remaining_tokens]
        assert sampling in ([], request.live)
