"""Memory promised, shared, copied before it is written, and let go."""

from functools import partial

import pytest
from builders import Checked, make_intake, make_limits, make_request

from paxserve.eviction.lru import Lru
from paxserve.forks import Claim, plan_forks
from paxserve.kv.block_pool import BlockPool
from paxserve.kv.block_table import BlockTables
from paxserve.placement.paged import Paged
from paxserve.prefix_cache.none import NoCache
from paxserve.reservation.max import Max
from paxserve.reservation.on_demand import OnDemand

LIMITS = make_limits(block_size=4, num_blocks=6, max_model_len=10)


def tables(reservation=None, *, num_blocks=6, refuses=lambda call: False):
    pool = BlockPool(
        num_blocks=num_blocks,
        placement=Checked(Paged(), refuses),
        new_index=partial(NoCache().open, LIMITS.block_size),
        eviction=Lru(),
    )
    return BlockTables(pool=pool, reservation=reservation or OnDemand(), limits=LIMITS)


def samples(num, *, num_prompt=6):
    """A request whose samples share a prompt; its sources are planned."""
    request = make_request(num_prompt, intake=make_intake(LIMITS), n=num, temperature=1.0)
    plan_forks(request, block_size=LIMITS.block_size)
    return request


def everything(request):
    return [Claim(sequence, sequence.num_remaining_tokens) for sequence in request.live]


def compute(request):
    """What `planning` does to counts: all samples have come to their last known token."""
    for sequence in request.live:
        sequence.num_computed_tokens += sequence.num_remaining_tokens
        sequence.num_remaining_tokens, sequence.source = 1, None
        sequence.token_ids.append(50 + sequence.index)


def started(held, num=3, *, num_prompt=6):
    request = samples(num, num_prompt=num_prompt)
    assert held.hold(request, everything(request))
    compute(request)
    return request


def hold(held, request, num_tokens):
    """Room for so many tokens of its only sequence, from the first one on."""
    return held.hold(request, [Claim(request.sequence, num_tokens)])


def state(held, request):
    return (
        [(list(s.block_table), s.num_reserved_tokens) for s in request.sequences],
        [held.pool.ref_count(b) for b in range(held.pool.num_blocks)],
        held.pool.num_free,
        list(held._copies),
        +held._num_leaving,
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (20, 5)]
)
def test_on_demand_holds_as_many_blocks_as_the_tokens_fill(num_tokens, num_blocks):
    held, request = tables(), make_request()
    assert held.num_blocks_needed(request, num_tokens) == num_blocks
    assert hold(held, request, num_tokens)
    assert len(request.sequence.block_table) == num_blocks
    assert request.sequence.num_reserved_tokens == num_tokens
    assert held.pool.num_free == 5 - num_blocks
    assert not held.promises_ahead


def test_a_table_grows_at_its_end_and_only_when_the_last_block_is_full():
    held, request = tables(), make_request()
    lengths, before = [], []
    for num_tokens in range(1, 10):
        assert hold(held, request, num_tokens)
        table = request.sequence.block_table
        assert table[: len(before)] == before
        before = list(table)
        lengths.append(len(table))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_max_holds_the_longest_request_from_the_first_token_on():
    held, request = tables(Max()), make_request()
    assert held.num_blocks_needed(request, 1) == 3
    assert hold(held, request, 1)
    first = list(request.sequence.block_table)
    assert (len(first), request.sequence.num_reserved_tokens) == (3, 10)
    assert held.promises_ahead
    assert hold(held, request, 10)
    assert request.sequence.block_table == first


def test_a_refusal_changes_nothing():
    held, request, other = tables(), make_request(), make_request()
    assert hold(held, other, 12)
    assert hold(held, request, 4)
    before = state(held, request)
    assert not hold(held, request, 16)
    assert state(held, request) == before
    assert held.pool.num_free == 1
    assert hold(held, request, 8)


@pytest.mark.parametrize("num_prompt", [5, 6, 8])
def test_samples_of_a_prompt_hold_its_blocks_together(num_prompt):
    held = tables()
    request = samples(3, num_prompt=num_prompt)
    assert held.num_missing_blocks(request, everything(request)) == 2
    assert held.hold(request, everything(request))
    trunk, second, third = (s.block_table for s in request.sequences)
    assert trunk == second == third
    assert [held.pool.ref_count(b) for b in trunk] == [3, 3]
    assert held.settle() == []


def test_the_first_writers_copy_and_the_last_one_writes_in_place():
    held = tables()
    request = started(held)
    shared = list(request.sequence.block_table)
    assert held.footprint(request) == (shared, 6)
    claims = everything(request)
    assert held.num_missing_blocks(request, claims) == 2
    assert held.hold(request, claims)
    first, second, third = (s.block_table for s in request.sequences)
    assert first[0] == second[0] == third[0] == shared[0]
    assert third == shared
    assert len({first[1], second[1], third[1]}) == 3
    assert held.pool.ref_count(shared[1]) == 3  # two copies are still to be made from it
    assert held.num_missing_blocks(request, claims) == 0
    copies = held.settle()
    assert [(c.sequence, c.column, c.source, c.target) for c in copies] == [
        (request.sequences[0], 1, shared[1], first[1]),
        (request.sequences[1], 1, shared[1], second[1]),
    ]
    assert [held.pool.ref_count(s.block_table[1]) for s in request.sequences] == [1, 1, 1]
    assert held.pool.ref_count(shared[0]) == 3
    assert held.settle() == []


def test_a_full_shared_block_is_not_copied():
    held = tables()
    request = started(held, 2, num_prompt=4)
    assert held.hold(request, everything(request))
    first, second = (s.block_table for s in request.sequences)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert held.settle() == []


def test_a_copied_column_is_sent_again():
    held = tables()
    request = started(held, 2)
    for sequence in request.sequences:
        sequence.num_sent_blocks = 2
    held.hold(request, everything(request))
    assert [s.num_sent_blocks for s in request.sequences] == [1, 2]


def test_a_copy_that_is_forgotten_leaves_everything_as_it_was():
    held = tables()
    request = started(held)
    before = state(held, request)
    held.hold(request, everything(request))
    for sequence, (_, reserved) in zip(request.sequences, before[0], strict=True):
        held.forget_copies(sequence)
        sequence.num_reserved_tokens = reserved
    assert state(held, request) == before
    assert held.settle() == []


def test_letting_go_of_one_that_copied_forgets_its_copy():
    held = tables()
    request = started(held, 2)
    held.hold(request, everything(request))
    copier = request.sequences[0]
    held.let_go(copier)
    assert held.settle() == []
    assert [held.pool.ref_count(b) for b in request.sequences[1].block_table] == [1, 1]
    assert held.pool.num_free == 3


def test_copies_that_do_not_fit_are_refused_and_nothing_is_copied():
    held = tables(num_blocks=4)  # one block is free where two copies are needed
    request = started(held)
    before = state(held, request)
    assert not held.hold(request, everything(request))
    assert state(held, request) == before


@pytest.mark.parametrize("fails", [1, 2, 3, 4, 5])
def test_a_placement_that_refuses_in_the_middle_undoes_what_came_before(fails):
    """Two samples copy their last block, and every one of three needs another behind it."""
    failing = []
    held = tables(num_blocks=20, refuses=lambda call: call in failing)
    request = started(held)
    before = state(held, request)
    calls = held.pool.free_space.num_calls
    failing.append(calls + fails)
    claims = [Claim(sequence, 3) for sequence in request.sequences]
    assert not held.hold(request, claims)
    assert state(held, request) == before
    assert held.hold(request, claims)
    assert [len(s.block_table) for s in request.sequences] == [3, 3, 3]


def test_a_sequence_that_goes_its_own_way_takes_over_whole_blocks_only():
    held = tables(num_blocks=9)
    request = samples(2)
    for sequence in request.sequences:
        sequence.token_ids.append(50 + sequence.index)
        sequence.num_remaining_tokens, sequence.num_computed_tokens = 7, 0
    plan_forks(request, block_size=4)
    trunk, branch = request.sequences
    assert (branch.num_computed_tokens, branch.num_remaining_tokens) == (4, 3)
    assert held.num_missing_blocks(request, everything(request)) == 3
    assert held.hold(request, everything(request))
    assert trunk.block_table[0] == branch.block_table[0]
    assert trunk.block_table[1] != branch.block_table[1]
    assert (branch.num_reserved_tokens, len(branch.block_table)) == (7, 2)
    assert held.settle() == []


def test_computed_blocks_and_footprint_count_what_is_computed_once():
    held = tables()
    request = started(held, 2)
    held.hold(request, everything(request))
    held.settle()
    compute(request)
    first, second = request.sequences
    assert held.computed_blocks(first) == first.block_table
    blocks, num_slots = held.footprint(request)
    assert sorted(blocks) == sorted({*first.block_table, *second.block_table})
    assert num_slots == 4 + 3 + 3
    first.num_computed_tokens = second.num_computed_tokens = 4
    assert held.computed_blocks(first) == first.block_table[:1]
    assert held.footprint(request) == (first.block_table[:1], 4)


def test_a_table_that_begins_with_shared_blocks_must_be_empty():
    held, request = tables(), make_request()
    hold(held, request, 4)
    with pytest.raises(AssertionError):
        held.share(request.sequence, [1], is_hit=True)


def test_letting_go_gives_back_every_block():
    held, request = tables(), make_request()
    hold(held, request, 9)
    request.sequence.num_sent_blocks = request.sequence.num_published_blocks = 2
    held.let_go(request.sequence)
    sequence = request.sequence
    assert (sequence.block_table, sequence.num_reserved_tokens) == ([], 0)
    assert (sequence.num_sent_blocks, sequence.num_published_blocks) == (0, 0)
    assert (held.pool.num_free, held.pool.num_held) == (5, 0)
    held.let_go(sequence)
    assert held.pool.num_free == 5


def test_a_reservation_that_promises_too_little_is_caught():
    class Stingy:
        grows = True

        def num_tokens(self, request, *, num_needed, limits):
            return num_needed - 1

    with pytest.raises(RuntimeError, match=r"Stingy promised 4 tokens to .*, which needs 5"):
        hold(tables(Stingy()), make_request(), 5)
