import pytest

from paxserve.kv.block_pool import BlockPool
from paxserve.placement.paged import Paged


def pool(num_blocks=6):
    return BlockPool(num_blocks=num_blocks, placement=Paged())


def test_a_block_is_referenced_from_taking_to_release():
    blocks = pool()
    taken = blocks.take(2)
    assert [blocks.ref_count(b) for b in taken] == [1, 1]
    assert (blocks.num_free, blocks.num_referenced) == (3, 2)
    blocks.release(taken)
    assert [blocks.ref_count(b) for b in taken] == [0, 0]
    assert (blocks.num_free, blocks.num_referenced) == (5, 0)


def test_all_but_the_null_block_can_be_taken_and_then_none():
    blocks = pool()
    assert blocks.take(6) is None
    assert sorted(blocks.take(5)) == [1, 2, 3, 4, 5]
    assert blocks.take(1) is None
    assert blocks.extend([1], 1) is None
    assert (blocks.num_free, blocks.num_referenced, blocks.ref_count(0)) == (0, 5, 0)


def test_a_block_named_twice_is_not_freed_twice():
    blocks = pool()
    first, second = blocks.take(2)
    with pytest.raises(RuntimeError, match="not held once each"):
        blocks.release([first, second, first])
    assert (blocks.ref_count(first), blocks.num_free) == (1, 3)


def test_releasing_what_nobody_holds_is_an_error_and_changes_nothing():
    blocks = pool()
    taken = blocks.take(2)
    for wrong in ([0], [5], [*taken, 5]):
        with pytest.raises(RuntimeError, match="null or unreferenced among them"):
            blocks.release(wrong)
    assert (blocks.num_free, blocks.num_referenced) == (3, 2)
    blocks.release(taken)
    with pytest.raises(RuntimeError):
        blocks.release(taken)
    assert blocks.num_free == 5


def test_a_placement_that_hands_out_a_held_or_the_null_block_is_caught():
    blocks = pool()
    taken = blocks.take(1)
    blocks.free_space.give_back(taken)  # behind the pool's back
    with pytest.raises(RuntimeError, match=f"handed out block {taken[0]}, which is not free"):
        blocks.take(1)
    blocks = pool()
    blocks.free_space.give_back([0])
    with pytest.raises(RuntimeError, match="handed out block 0"):
        blocks.take(1)
