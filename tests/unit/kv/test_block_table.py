import dataclasses

import pytest
from builders import make_limits, make_request

from paxserve.kv.block_pool import BlockPool
from paxserve.kv.block_table import BlockTables
from paxserve.placement.paged import Paged
from paxserve.request import Sequence
from paxserve.reservation.max import Max
from paxserve.reservation.on_demand import OnDemand

LIMITS = make_limits(block_size=4, num_blocks=6, max_model_len=10)


def tables(reservation=None):
    pool = BlockPool(num_blocks=LIMITS.num_blocks, placement=Paged())
    return BlockTables(pool=pool, reservation=reservation or OnDemand(), limits=LIMITS)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (20, 5)]
)
def test_on_demand_holds_as_many_blocks_as_the_tokens_fill(num_tokens, num_blocks):
    held, request = tables(), make_request()
    assert held.num_blocks_needed(request, num_tokens) == num_blocks
    assert held.hold(request, num_tokens)
    assert len(request.sequence.block_table) == num_blocks
    assert request.sequence.num_reserved_tokens == num_tokens
    assert held.pool.num_free == 5 - num_blocks


def test_a_table_grows_at_its_end_and_only_when_the_last_block_is_full():
    held, request = tables(), make_request()
    lengths = []
    before = []
    for num_tokens in range(1, 10):
        assert held.hold(request, num_tokens)
        table = request.sequence.block_table
        assert table[: len(before)] == before
        before = list(table)
        lengths.append(len(table))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_max_holds_the_longest_request_from_the_first_token_on():
    held, request = tables(Max()), make_request()
    assert held.num_blocks_needed(request, 1) == 3
    assert held.hold(request, 1)
    first = list(request.sequence.block_table)
    assert (len(first), request.sequence.num_reserved_tokens) == (3, 10)
    assert held.hold(request, 10)
    assert request.sequence.block_table == first


def test_a_refusal_changes_nothing():
    held, request, other = tables(), make_request(), make_request()
    assert held.hold(other, 12)
    assert held.hold(request, 4)
    before = (list(request.sequence.block_table), request.sequence.num_reserved_tokens)
    assert not held.hold(request, 16)
    assert (request.sequence.block_table, request.sequence.num_reserved_tokens) == before
    assert held.pool.num_free == 1
    assert held.hold(request, 8)


def test_several_sequences_get_their_blocks_all_or_none():
    held = tables()
    request = make_request()
    twins = tuple(Sequence(sequence_id=i, token_ids=[1], num_remaining_tokens=1) for i in (10, 11))
    request = dataclasses.replace(request, sequences=twins)
    assert held.hold(request, 8)
    assert [len(s.block_table) for s in twins] == [2, 2]
    before = [list(s.block_table) for s in twins]
    assert not held.hold(request, 9)  # one block is left, two are needed
    assert [s.block_table for s in twins] == before
    assert [s.num_reserved_tokens for s in twins] == [8, 8]
    assert held.pool.num_free == 1
    held.let_go(request)
    assert held.pool.num_free == 5


def test_letting_go_gives_back_every_block():
    held, request = tables(), make_request()
    held.hold(request, 9)
    held.let_go(request)
    assert (request.sequence.block_table, request.sequence.num_reserved_tokens) == ([], 0)
    assert (held.pool.num_free, held.pool.num_referenced) == (5, 0)
    held.let_go(request)
    assert held.pool.num_free == 5


def test_a_reservation_that_promises_too_little_is_caught():
    class Stingy:
        grows = True

        def num_tokens(self, request, *, num_needed, limits):
            return num_needed - 1

    with pytest.raises(RuntimeError, match=r"Stingy promised 4 tokens to .*, which needs 5"):
        tables(Stingy()).hold(make_request(), 5)
