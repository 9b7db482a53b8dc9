"""Who holds each block, which may be found, and which dies first."""

from functools import partial

import pytest
from builders import free_blocks
from hypothesis import given
from hypothesis import strategies as st

from paxserve.eviction.lfu import Lfu
from paxserve.eviction.lru import Lru
from paxserve.kv.block_pool import NO_MATCH, BlockPool
from paxserve.placement.paged import Paged
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.none import NoCache
from paxserve.prefix_cache.radix import Radix


def make_pool(num_blocks=6, cache=None, eviction=None, block_size=1):
    return BlockPool(
        num_blocks=num_blocks,
        placement=Paged(),
        new_index=partial((cache or NoCache()).open, block_size),
        eviction=eviction or Lru(),
    )


def publish(pool, *token_ids, start=0, table=None):
    """Take blocks for a sequence of these tokens, one each, and publish them."""
    table = table or pool.take(len(token_ids))
    pool.publish(token_ids, table, salt="", start=start)
    return table


def counts(pool):
    return pool.num_free, pool.num_held, pool.num_cached


def test_a_block_is_referenced_from_taking_to_release():
    pool = make_pool()
    taken = pool.take(2)
    assert [pool.ref_count(b) for b in taken] == [1, 1]
    assert counts(pool) == (3, 2, 0)
    pool.release(taken)
    assert [pool.ref_count(b) for b in taken] == [0, 0]
    assert counts(pool) == (5, 0, 0)


def test_all_but_the_null_block_can_be_taken_and_then_none():
    pool = make_pool()
    assert pool.take(6) is None
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.take(1) is None
    assert pool.extend([1], 1) is None
    assert (counts(pool), pool.ref_count(0)) == ((0, 5, 0), 0)


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = make_pool()
    table = pool.take(2)
    pool.share(table, is_hit=False)
    pool.share(table[:1], is_hit=False)
    assert ([pool.ref_count(b) for b in table], pool.num_extra_refs) == ([3, 2], 3)
    pool.release(table)
    assert (counts(pool), pool.num_extra_refs) == ((3, 2, 0), 1)
    pool.release(table)
    assert (counts(pool), pool.num_extra_refs) == ((4, 1, 0), 0)
    pool.release(table[:1])
    assert counts(pool) == (5, 0, 0)


def test_sharing_what_nobody_holds_and_nobody_finds_is_an_error():
    pool = make_pool()
    with pytest.raises(RuntimeError, match="block 3 is shared, but neither held nor cached"):
        pool.share([3], is_hit=True)


def test_a_block_named_twice_is_not_freed_twice():
    pool = make_pool()
    first, second = pool.take(2)
    pool.share([first], is_hit=False)
    with pytest.raises(RuntimeError, match="not held once each"):
        pool.release([first, second, first])
    assert (pool.ref_count(first), pool.num_free) == (2, 3)


def test_releasing_what_nobody_holds_is_an_error_and_changes_nothing():
    pool = make_pool()
    taken = pool.take(2)
    for wrong in ([0], [5], [*taken, 5]):
        with pytest.raises(RuntimeError, match="null or unreferenced among them"):
            pool.release(wrong)
    assert counts(pool) == (3, 2, 0)
    pool.release(taken)
    with pytest.raises(RuntimeError):
        pool.release(taken)
    assert pool.num_free == 5


def test_a_placement_that_hands_out_a_held_or_the_null_block_is_caught():
    pool = make_pool()
    taken = pool.take(1)
    pool.free_space.give_back(taken)  # behind the pool's back
    with pytest.raises(RuntimeError, match=f"handed out block {taken[0]}, which is not free"):
        pool.take(1)
    pool = make_pool()
    pool.free_space.give_back([0])
    with pytest.raises(RuntimeError, match="handed out block 0"):
        pool.take(1)


def test_a_released_block_that_can_be_found_is_cached_and_comes_back_when_shared():
    pool = make_pool(cache=HashChain())
    table = publish(pool, 7, 8)
    pool.release(table[::-1])
    assert (counts(pool), pool.num_available) == ((3, 0, 2), 5)
    assert pool.num_unheld(table) == 2
    pool.share(table[:1], is_hit=True)
    assert (counts(pool), pool.num_extra_refs) == ((3, 1, 1), 0)
    assert pool.num_unheld(table) == 1
    assert pool.cached == table[1:]


def test_cached_blocks_are_evicted_only_for_what_is_missing_and_never_in_vain():
    pool = make_pool(cache=HashChain())
    pool.release(publish(pool, 7, 8, 9))
    assert pool.take(6) is None
    assert (counts(pool), pool.num_evicted) == ((2, 0, 3), 0)
    assert len(pool.take(4)) == 4
    assert (counts(pool), pool.num_evicted) == ((0, 4, 1), 2)
    assert pool.extend([1], 1) is not None
    assert (counts(pool), pool.num_evicted) == ((0, 5, 0), 3)
    assert len(pool.index) == 0


@pytest.mark.parametrize("cache", [HashChain(), Radix()])
def test_of_two_tables_the_one_let_go_first_dies_first_and_of_one_its_end(cache):
    pool = make_pool(7, cache)
    first, second = publish(pool, 1, 2, 3), publish(pool, 4, 5, 6)
    pool.release(first[::-1])
    pool.release(second[::-1])
    died = []
    for _ in range(6):
        before = set(pool.cached)
        pool.take(1)
        died += before - set(pool.cached)
    assert died == [*first[::-1], *second[::-1]]


def test_a_block_that_was_used_again_is_ranked_anew():
    pool = make_pool(4, HashChain())
    tables = [publish(pool, token) for token in (1, 2, 3)]
    for table in tables:
        pool.release(table)
    pool.share(tables[0], is_hit=True)
    pool.release(tables[0])
    assert pool.take(1) == tables[1]


def test_what_was_hit_outlives_what_was_not_and_starts_anew_with_other_content():
    pool = make_pool(4, HashChain(), Lfu())
    hit, plain = publish(pool, 1), publish(pool, 2)
    pool.release(hit)
    pool.share(hit, is_hit=True)
    pool.release(hit)
    pool.release(plain)
    pool.take(1)
    assert [pool.take(1), pool.take(1)] == [plain, hit]  # though `plain` was used last
    for table in (hit, plain):
        publish(pool, table[0], table=table)
        pool.release(table)
    assert [pool.take(1), pool.take(1)] == [hit, plain]  # neither has a hit by now


class ShallowFirst:
    def key(self, block):
        return (block.depth,)


@pytest.mark.parametrize("eviction", [Lru(), ShallowFirst()])
def test_in_a_tree_a_block_is_evicted_after_what_stands_behind_it(eviction):
    """Also where the prefix of two sequences ranks before them."""
    pool = make_pool(4, Radix(), eviction)
    (root,) = publish(pool, 1)
    left = pool.take(1)
    pool.share([root], is_hit=True)
    publish(pool, 1, 2, table=[root, *left], start=1)
    right = pool.take(1)
    pool.share([root], is_hit=True)
    publish(pool, 1, 3, table=[root, *right], start=1)
    for block_ids in ([root], [*left, root], [*right, root]):
        pool.release(block_ids)
    assert [pool.take(1) for _ in range(3)] == [left, right, [root]]


def test_unpublishing_frees_what_nobody_holds_and_hides_what_is_held():
    pool = make_pool(cache=Radix())
    table = publish(pool, 1, 2, 3)
    pool.release(table[:0:-1])
    assert counts(pool) == (2, 1, 2)
    pool.unpublish(table)
    assert (counts(pool), len(pool.index)) == ((4, 1, 0), 0)
    pool.release(table[:1])
    assert counts(pool) == (5, 0, 0)


def test_forgetting_everything_frees_the_cached_and_keeps_the_held():
    pool = make_pool(cache=HashChain())
    held, cached = publish(pool, 1), publish(pool, 2, 3)
    pool.release(cached)
    pool.forget_all()
    assert (counts(pool), len(pool.index)) == ((4, 1, 0), 0)
    pool.release(held)
    assert (counts(pool), pool.take(5) is not None) == ((5, 0, 0), True)
    assert pool.num_evicted == 0


def test_the_queue_of_cached_blocks_stays_as_short_as_what_is_cached():
    pool = make_pool(4, HashChain())
    tables = [publish(pool, token) for token in (1, 2, 3)]
    for _ in range(500):
        for table in tables:
            pool.release(table)
            pool.share(table, is_hit=True)
    assert len(pool._queue) <= 2 * 3 + 64 + 1
    for table in (tables[1], tables[2], tables[0]):
        pool.release(table)
    assert [pool.take(1) for _ in range(3)] == [tables[1], tables[2], tables[0]]


@pytest.mark.parametrize("cache", [HashChain(), Radix()])
def test_of_what_was_found_before_only_the_forgotten_is_looked_for_again(cache):
    pool, tokens = make_pool(4, cache), (1, 2, 3)

    def match(earlier=NO_MATCH, num_blocks=3):
        return pool.match(tokens, salt="", num_blocks=num_blocks, earlier=earlier)

    table = publish(pool, *tokens)
    first = match()
    assert first.block_ids == match(first).block_ids == table
    assert match(first, num_blocks=2).block_ids == table[:2]
    pool.release(table[::-1])
    assert pool.take(1) == table[2:]  # evicted, and used for something else
    publish(pool, 9, table=table[2:])
    second = match(first)
    assert second.block_ids == table[:2]
    pool.share(table[:2], is_hit=True)
    pool.unpublish(table[2:])
    publish(pool, *tokens, table=table, start=2)
    third = match(second)
    assert third.block_ids == match(first).block_ids == table
    pool.forget_all()
    assert match(third).block_ids == match(first).block_ids == []


@given(
    data=st.data(),
    cache=st.sampled_from([NoCache(), HashChain(), Radix()]),
    num_blocks=st.integers(2, 9),
)
def test_every_block_is_free_held_or_cached_whatever_is_done(data, cache, num_blocks):
    pool, tables = make_pool(num_blocks, cache), []
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["take", "share", "release", "unpublish", "forget"]))
        if what == "take":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
            table = pool.index.match(tokens, salt="", num_blocks=len(tokens) - 1)
            pool.share(table, is_hit=True)
            new = pool.take(len(tokens) - len(table))
            if new is None:
                pool.release(table)
                continue
            start, table = len(table), [*table, *new]
            pool.publish(tokens, table, salt="", start=start)
            tables.append(table)
        elif what == "forget":
            pool.forget_all()
        elif tables:
            table = data.draw(st.sampled_from(tables))
            if what == "release":
                tables.remove(table)
                pool.release(table[::-1])
            elif what == "share":
                pool.share(table, is_hit=False)
                tables.append(list(table))
            elif not isinstance(cache, Radix):
                pool.unpublish(table)
        held = {b for table in tables for b in table}
        assert sorted([*free_blocks(pool.free_space), *held, *pool.cached]) == list(
            range(1, num_blocks)
        )
        assert all(pool.ref_count(b) == sum(b in t for t in tables) for b in range(num_blocks))
        assert pool.num_extra_refs == sum(map(len, tables)) - len(held)
        assert all(b in pool.index for b in pool.cached)
    assert pool.take(pool.num_available + 1) is None
    assert pool.num_available == 0 or len(pool.take(pool.num_available)) > 0
