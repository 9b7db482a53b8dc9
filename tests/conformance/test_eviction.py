"""Every eviction order: pure, without ties, and children before the prefix they need."""

import dataclasses
import itertools

import pytest
from axes import name_of, policies
from hypothesis import given
from hypothesis import strategies as st

from paxserve.eviction import BlockStats
from paxserve.eviction.depth_aware import DepthAware
from paxserve.eviction.lfu import Lfu
from paxserve.eviction.lru import Lru

EVICTIONS = policies("eviction")
per_eviction = pytest.mark.parametrize("eviction", EVICTIONS, ids=name_of)

COUNTS = st.integers(0, 3)
STATS = st.builds(BlockStats, last_used=COUNTS, num_hits=COUNTS, depth=COUNTS)


@per_eviction
@given(blocks=st.lists(STATS, max_size=20))
def test_a_key_depends_on_the_block_alone(eviction, blocks):
    keys = [eviction.key(block) for block in blocks]
    again = dataclasses.replace(eviction)
    assert [again.key(block) for block in reversed(blocks)] == keys[::-1]
    assert all(type(part) is int for key in keys for part in key)


@per_eviction
def test_blocks_of_two_releases_or_two_depths_never_tie(eviction):
    """Of one release only one block has a given depth, so every two blocks are in an order."""
    grid = [
        BlockStats(used, hits, depth) for used, hits, depth in itertools.product(range(4), repeat=3)
    ]
    for a, b in itertools.combinations(grid, 2):
        if (a.last_used, a.depth) != (b.last_used, b.depth):
            assert eviction.key(a) != eviction.key(b)


@per_eviction
@given(hits=st.lists(st.integers(0, 3), min_size=1, max_size=12), last_used=st.integers(0, 9))
def test_of_a_table_let_go_at_once_the_last_block_dies_first(eviction, hits, last_used):
    """A hit on a block is one on all before it, so hits never rise along a table."""
    table = [
        BlockStats(last_used, num_hits, depth)
        for depth, num_hits in enumerate(sorted(hits, reverse=True))
    ]
    assert sorted(table, key=eviction.key) == table[::-1]


OLD_ROOT = BlockStats(last_used=1, num_hits=5, depth=0)
OLD_LEAF = BlockStats(last_used=1, num_hits=0, depth=3)
NEW_ROOT = BlockStats(last_used=2, num_hits=0, depth=0)
NEW_LEAF = BlockStats(last_used=2, num_hits=0, depth=4)


@pytest.mark.parametrize(
    ("eviction", "order"),
    [
        (Lru(), [OLD_LEAF, OLD_ROOT, NEW_LEAF, NEW_ROOT]),
        (Lfu(), [OLD_LEAF, NEW_LEAF, NEW_ROOT, OLD_ROOT]),
        (DepthAware(), [NEW_LEAF, OLD_LEAF, OLD_ROOT, NEW_ROOT]),
    ],
    ids=["lru", "lfu", "depth_aware"],
)
def test_the_order_is_the_one_named(eviction, order):
    for given_order in itertools.permutations(order):
        assert sorted(given_order, key=eviction.key) == order
