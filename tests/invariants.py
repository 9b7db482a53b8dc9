"""What must hold of an engine between any two calls. Numbers are those of the design notes:
I1 conservation, I2 reference counts, I3 no duplicates, I4 table lengths, I10 idle, I12 budget.
(I5, one writer per slot, is checked by the scripted executor, I8 by `CheckedSpace`.)
"""

from collections import Counter

from builders import Checked, free_blocks

from paxserve.engine import Engine
from paxserve.placement.first_fit import FirstFit
from paxserve.placement.paged import Paged
from paxserve.request import State


def check(engine: Engine) -> None:
    """All invariants, from sets of ids and never from counters."""
    _check_membership(engine)
    _check_blocks(engine)
    _check_tables(engine)
    _check_rows(engine)


def check_idle(engine: Engine) -> None:
    """I10: nothing is left of the requests that were served."""
    batch, limits = engine.scheduler.batch, engine.limits
    assert not engine.has_work
    assert (len(batch.waiting), batch.running, batch.finished) == (0, [], [])
    assert batch.requests == {}
    assert batch.by_sequence == {}
    assert sorted(batch.free_rows) == list(range(limits.max_num_seqs))
    assert free_blocks(batch.pool.free_space) == list(range(1, limits.num_blocks))
    assert batch.pool.num_referenced == 0
    assert batch.ended == []
    for request in engine.requests:
        assert request.state is State.FINISHED
        assert request.sequence.block_table == []
        assert request.sequence.row == -1


def _check_membership(engine: Engine) -> None:
    batch = engine.scheduler.batch
    waiting = list(batch.waiting)
    members = [*waiting, *batch.running, *batch.finished]
    assert len(set(members)) == len(members)
    assert (
        set(members) == set(batch.requests.values()) == {r for r, _ in batch.by_sequence.values()}
    )
    assert all(request.state is State.WAITING for request in waiting)
    assert all(request.state is State.RUNNING for request in batch.running)
    assert all(request.state is State.FINISHED for request in batch.finished)
    keys = [(r.arrival_s, r.arrival_seq) for r in waiting]
    assert keys == sorted(keys)
    seqs = [r.admitted_seq for r in batch.running]
    assert seqs == sorted(set(seqs))


def _check_blocks(engine: Engine) -> None:
    batch = engine.scheduler.batch
    pool = batch.pool
    free = free_blocks(pool.free_space)
    tables = [s.block_table for r in batch.requests.values() for s in r.sequences]
    holders = Counter(block_id for table in tables for block_id in set(table))
    assert len(set(free)) == len(free) == pool.num_free  # I3
    assert not set(free) & set(holders)  # I1
    assert {*free, *holders, 0} == set(range(pool.num_blocks))
    assert 0 not in holders
    for block_id in range(pool.num_blocks):  # I2
        assert pool.ref_count(block_id) == holders[block_id]
    assert pool.num_referenced == len(holders)
    assert 0 <= pool.free_space.largest_free_run() <= len(free)


def _check_tables(engine: Engine) -> None:
    batch, block_size = engine.scheduler.batch, engine.limits.block_size
    placement = engine.scheduler.policies.placement
    contiguous = placement.contiguous
    placement = placement.inner if isinstance(placement, Checked) else placement
    is_exact = isinstance(placement, Paged | FirstFit)
    for request in batch.requests.values():
        for sequence in request.sequences:
            table = sequence.block_table
            if request.state is State.WAITING:
                assert (table, sequence.num_computed_tokens, sequence.row) == ([], 0, -1)
                assert sequence.num_reserved_tokens == 0
                continue
            assert len(set(table)) == len(table)
            covered = max(sequence.num_reserved_tokens, sequence.num_computed_tokens)
            num_blocks = -(-covered // block_size)  # I4
            assert len(table) == num_blocks or (not is_exact and len(table) > num_blocks)
            if contiguous and table:
                assert table == list(range(table[0], table[0] + len(table)))
            assert len(sequence.token_ids) == sequence.num_known_tokens or (
                request.state is State.FINISHED
            )
            assert sequence.num_computed_tokens <= sequence.num_known_tokens


def _check_rows(engine: Engine) -> None:
    batch, limits = engine.scheduler.batch, engine.limits
    held = [s.row for r in (*batch.running, *batch.finished) for s in r.sequences]
    assert sorted([*held, *batch.free_rows]) == list(range(limits.max_num_seqs))
    assert len(batch.running) <= limits.max_num_seqs  # I12; the rest of it is in `Recording`
