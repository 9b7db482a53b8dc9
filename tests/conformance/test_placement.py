"""Every placement against a plain set of free blocks, and the work it does in large pools."""

import sys
from pathlib import Path

import pytest
from axes import name_of, policies
from builders import free_blocks
from hypothesis import event, given, settings
from hypothesis import strategies as st

import paxserve.placement
from paxserve.placement.buddy import Buddy
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
    st.tuples(
        st.sampled_from(["take", "take", "extend", "give back", "give back tail"]),
        st.integers(1, 7),
    ),
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
                kept = len(table) // 2 if operation == "give back tail" else 0
                space.give_back(table[kept:])
                free |= set(table[kept:])
                tables.remove(table)
                tables += [table[:kept]] * (kept > 0)
                found = []
        if found is None:
            event(f"{operation} refused")
            assert size > len(free) or placement.contiguous  # others have no reason to refuse
        elif not operation.startswith("give back"):
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


def aligned_runs(free, start, length):
    """The naive buddy system: a run is free as a whole, or is split into its halves."""
    if free >= set(range(start, start + length)):
        return [(length, start)]
    if length == 1:
        return []
    half = length // 2
    return aligned_runs(free, start, half) + aligned_runs(free, start + half, half)


def buddies(free, size, num_blocks):
    """Free runs (length, offset), and the power of two that `size` is rounded up to."""
    whole = power = 1
    while whole < num_blocks:
        whole *= 2
    while power < size:
        power *= 2
    return aligned_runs(free, 0, whole), power


def what_buddies_take(free, size, num_blocks):
    runs, power = buddies(free, size, num_blocks)
    _, first = min([run for run in runs if run[0] >= power], default=(0, None))
    return None if first is None else list(range(first, first + power))


def what_buddies_add(free, table, size, num_blocks):
    """A table of some offsets grows to an aligned run with room for it, where its rest is free."""
    _, power = buddies(free, len(table) + size, num_blocks)
    rest = list(range(table[0] + len(table), table[0] + power))
    return rest if table[0] % power == 0 and free >= set(rest) else None


@given(num_blocks=st.integers(2, 40), operations=OPERATIONS, data=st.data())
@settings(max_examples=400)
def test_buddies_against_a_naive_model(num_blocks, operations, data):
    """The model knows free offsets only, and cuts them anew whenever it is asked."""
    space = Buddy().open(num_blocks)
    free = set(range(num_blocks - 1))
    tables, loose = [], []  # of offsets, which are block ids - 1

    def offsets(block_ids):
        return None if block_ids is None else [block_id - 1 for block_id in block_ids]

    for operation, size in operations:
        found = None
        if operation == "take":
            found = offsets(space.take(size))
            assert found == what_buddies_take(free, size, num_blocks)
            tables += [found] if found else []
        elif operation == "extend" and tables:
            table = data.draw(st.sampled_from(tables))
            found = offsets(space.extend([offset + 1 for offset in table], size))
            assert found == what_buddies_add(free, table, size, num_blocks)
            event(f"extend: {found is not None}")
            table += found or []
        elif operation == "give back tail" and tables:
            table = tables[-1]
            kept = data.draw(st.integers(1, len(table)))
            space.give_back([offset + 1 for offset in table[kept:]])
            free |= set(table[kept:])
            del table[kept:]
        elif operation == "give back" and tables:  # in any order, and not always all of it
            loose += data.draw(st.permutations(tables.pop()))
            space.give_back([offset + 1 for offset in loose[size:]])
            free |= set(loose[size:])
            del loose[size:]
        free -= set(found or ())
        runs, power = buddies(free, size, num_blocks)
        assert free_blocks(space) == sorted(offset + 1 for offset in free)
        assert space.num_free == len(free)
        assert space.num_unfit(size) == sum(length for length, _ in runs if length < power)


def test_a_pool_of_13_is_cut_into_8_4_and_1():
    space = Buddy().open(14)
    assert [space.num_unfit(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 5, 5, 13]
    assert space.take(9) is None
    assert space.take(1) == [13]
    assert space.take(3) == [9, 10, 11, 12]
    assert space.take(5) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (space.num_free, space.take(1)) == (0, None)


def test_buddies_are_split_from_the_smallest_run_that_fits_and_merge_again():
    space = Buddy().open(17)
    assert space.take(1) == [1]  # free now: 2, 3-4, 5-8, 9-16
    assert space.take(3) == [5, 6, 7, 8]
    assert space.take(2) == [3, 4]
    space.give_back([5, 6, 7, 8])
    assert space.num_unfit(8) == 5  # 5-8 and 2 are free beside 9-16, but no buddies
    assert space.largest_free_run() == 12
    space.give_back([1])
    space.give_back([3, 4])
    assert (space.num_unfit(16), space.take(16)) == (0, list(range(1, 17)))


def test_a_table_swallows_its_right_buddies_if_all_are_free():
    space = Buddy().open(17)
    table = space.take(1)
    other = space.take(1)
    assert (table, other) == ([1], [2])
    assert space.extend(table, 1) is None
    assert space.extend(other, 1) is None  # 3 is free, but 2 is a right buddy itself
    space.give_back(other)
    assert space.extend(table, 1) == [2]
    assert space.extend([1, 2], 7) == list(range(3, 17))  # 9 blocks: buddies of 2, 4 and 8
    space.give_back(range(3, 17))
    space.give_back([2])
    assert space.extend(table, 4) == list(range(2, 9))
    space.give_back([7, 8])
    assert space.extend([1, 2, 3, 4, 5, 6], 1) == [7, 8]


def test_a_free_run_behind_a_table_that_is_no_buddy_of_it_stays_free():
    space = Buddy().open(17)
    _, second, third, _ = [space.take(4) for _ in range(4)]
    space.give_back(third)
    assert third == [9, 10, 11, 12]
    assert space.extend(second, 1) is None  # 5-8 and 9-12 would be no aligned run
    assert space.num_free == 4


def test_first_fit_takes_the_lowest_address_where_the_table_fits():
    space = FirstFit().open(20)
    table = space.take(19)
    for start, end in ((1, 3), (5, 8), (10, 13), (15, 20)):
        space.give_back(table[start - 1 : end - 1])
    assert space.take(3) == [5, 6, 7]
    assert space.take(4) == [15, 16, 17, 18]
    assert space.take(1) == [1]


def num_lines(call):
    """Lines of the placements that run during a call, loops counted as often as they turn."""
    here, count = str(Path(paxserve.placement.__file__).parent), 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename.startswith(here) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def work_in_a_pool_of_holes(placement, num_usable):
    """Lines per operation, with a table of 64 at the front and then every second block free."""
    space = placement.open(num_usable + 1)
    table = sorted(space.take(num_usable))
    space.give_back(table[65::2])
    lines = {
        "take": num_lines(lambda: space.take(1)),
        "refuse": num_lines(lambda: space.take(num_usable)),
        "extend": num_lines(lambda: space.extend(table[128:129], 1)),
        "give back": num_lines(lambda: space.give_back(table[256:257])),
        "give back 64": num_lines(lambda: space.give_back(table[:64])),
        "take 64": num_lines(lambda: space.take(64)),
        "num_free": num_lines(lambda: space.num_free),
        "num_unfit": num_lines(lambda: space.num_unfit(7)),
    }
    if isinstance(placement, FirstFit):
        lines["largest_free_run"] = num_lines(space.largest_free_run)
    return lines


@per_placement
def test_work_grows_at_most_like_the_logarithm_of_the_pool(placement):
    small = work_in_a_pool_of_holes(placement, 2**10)
    large = work_in_a_pool_of_holes(placement, 2**16)
    assert min(small["take"], small["extend"], small["give back 64"]) >= 1
    for what, lines in small.items():
        assert large[what] <= 2 * lines, what  # the logarithm grows by 16 / 10, the pool by 64


@per_placement
def test_a_table_costs_the_same_given_back_from_either_end(placement):
    """A sequence gives its last block back first: what it was promised in one run comes back
    downwards.
    """

    def lines(turned):
        space = placement.open(2**12 + 1)
        table = space.take(2**12)
        return num_lines(lambda: space.give_back(turned(table)))

    assert lines(lambda table: table[::-1]) <= 1.5 * lines(lambda table: table)
