"""Every placement against a plain set of free blocks."""

import pytest
from axes import name_of, policies
from builders import free_blocks
from hypothesis import event, given, settings
from hypothesis import strategies as st

from paxserve.placement.first_fit import FirstFit
from paxserve.placement.paged import Paged

PLACEMENTS = policies("placement")
per_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids=name_of)
per_exact_placement = pytest.mark.parametrize("placement", [FirstFit(), Paged()], ids=name_of)


def longest_run(free):
    longest = length = 0
    for block_id in range(max(free, default=0) + 1):
        length = length + 1 if block_id in free else 0
        longest = max(longest, length)
    return longest


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "extend", "give back"]), st.integers(1, 7)),
    max_size=40,
)


@per_placement
@given(num_blocks=st.integers(2, 20), operations=OPERATIONS, data=st.data())
@settings(max_examples=150)
def test_blocks_are_either_free_or_in_one_table(placement, num_blocks, operations, data):
    space = placement.open(num_blocks)
    free = set(range(1, num_blocks))
    tables = []
    for operation, size in operations:
        if operation == "take":
            found = space.take(size)
            if found is not None:
                tables.append(list(found))
        elif not tables:
            continue
        else:
            table = tables[data.draw(st.integers(0, len(tables) - 1))]
            if operation == "extend":
                before = list(table)
                found = space.extend(table, size)
                assert table == before  # the table belongs to the caller
                table += found or []
            else:
                space.give_back(table)
                free |= set(table)
                tables.remove(table)
                found = []
        if found is None:
            event(f"{operation} refused")
            assert size > len(free) or placement.contiguous  # others have no reason to refuse
        elif operation != "give back":
            assert len(found) >= size
            assert len(set(found)) == len(found)
            assert set(found) <= free
            free -= set(found)
        assert free_blocks(space) == sorted(free)
        assert space.num_free == len(free)
        assert space.largest_free_run() == longest_run(free)
        assert 0 <= space.num_unfit(size) <= len(free)
        if placement.contiguous:
            assert all(t == list(range(t[0], t[0] + len(t))) for t in tables)


@per_placement
def test_a_fresh_pool_holds_every_block_but_the_null_block(placement):
    space = placement.open(9)
    assert (space.num_free, space.largest_free_run()) == (8, 8)
    assert sorted(space.take(8)) == list(range(1, 9))
    assert (space.num_free, space.largest_free_run()) == (0, 0)


@per_placement
def test_a_refusal_changes_nothing(placement):
    space = placement.open(9)
    table = space.take(3)
    before = free_blocks(space)
    assert space.take(99) is None
    assert space.extend(table, 99) is None
    assert free_blocks(space) == before
    assert space.num_free == len(before)


@per_placement
def test_blocks_given_back_in_any_order_can_be_taken_as_one_again(placement):
    space = placement.open(9)
    tables = [space.take(2) for _ in range(4)]
    for i in (2, 0, 3, 1):
        space.give_back(tables[i])
    assert free_blocks(space) == list(range(1, 9))
    assert space.largest_free_run() == 8
    assert len(space.take(8)) == 8


@per_exact_placement
def test_unfit_blocks_are_those_in_runs_too_short(placement):
    """Free are 1-2 and 5-7 of eight; a table that needs 3 cannot lie in 1-2 if it is one run."""
    space = placement.open(8)
    tables = [space.take(1) for _ in range(7)]
    by_block = {table[0]: table for table in tables}
    for block_id in (1, 2, 5, 6, 7):
        space.give_back(by_block[block_id])
    if placement.contiguous:
        assert [space.num_unfit(n) for n in (1, 2, 3, 4)] == [0, 0, 2, 5]
        assert space.take(4) is None
    else:
        assert [space.num_unfit(n) for n in (1, 2, 3, 4)] == [0, 0, 0, 0]
        assert len(space.take(4)) == 4


@per_exact_placement
def test_a_contiguous_table_grows_only_into_the_blocks_behind_it(placement):
    space = placement.open(9)
    first, second = space.take(2), space.take(2)
    grown = space.extend(first, 1)
    if placement.contiguous:
        assert grown is None
        assert space.extend(second, 4) == [5, 6, 7, 8]
        space.give_back([*second, 5, 6, 7, 8])
        assert space.extend(first, 1) == [3]
    else:
        assert len(grown) == 1


@per_placement
def test_two_pools_know_nothing_of_each_other(placement):
    one, other = placement.open(5), placement.open(5)
    assert len(one.take(4)) == 4
    assert other.num_free == 4
