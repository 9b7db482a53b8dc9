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
    _check_sharing(engine)
    _check_host(engine)


def check_idle(engine: Engine) -> None:
    """I10: nothing is left of the requests that were served."""
    batch, limits = engine.scheduler.batch, engine.limits
    assert not engine.has_work
    assert (len(batch.waiting), batch.running, batch.finished) == (0, [], [])
    assert batch.requests == {}
    assert batch.by_sequence == {}
    assert sorted(batch.free_rows) == list(range(limits.max_num_seqs))
    idle = [*free_blocks(batch.pool.free_space), *batch.pool.cached]
    assert sorted(idle) == list(range(1, limits.num_blocks))
    assert batch.pool.num_held == batch.pool.num_extra_refs == 0
    assert batch.host_pool.num_free == batch.host_pool.num_blocks
    assert batch.ended == batch.dead == []
    for request in engine.requests:
        assert request.state is State.FINISHED
        assert all(s.block_table == s.host_blocks == [] for s in request.sequences)
        assert all(s.row == -1 for s in request.sequences)


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
    cached = pool.cached
    assert len(set(free)) == len(free) == pool.num_free  # I3
    assert len(set(cached)) == len(cached) == pool.num_cached
    assert not set(free) & set(holders)  # I1
    assert not set(cached) & {*free, *holders}
    assert {*free, *holders, *cached, 0} == set(range(pool.num_blocks))
    assert 0 not in holders
    assert all(block_id in pool.index for block_id in cached)
    assert not any(block_id in pool.index for block_id in free)
    assert pool.num_extra_refs == sum(holders.values()) - len(holders)
    for block_id in range(pool.num_blocks):  # I2
        assert pool.ref_count(block_id) == holders[block_id]
    assert pool.num_held == len(holders)
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
                assert (table, sequence.row, sequence.num_reserved_tokens) == ([], -1, 0)
                assert sequence.num_sent_blocks == sequence.num_published_blocks == 0
                num_host = -(-sequence.num_computed_tokens // block_size)
                is_kept = sequence.finish_reason is None and sequence.source is None
                assert len(sequence.host_blocks) == num_host or not is_kept
                continue
            assert sequence.host_blocks == []
            if sequence.finish_reason is not None and sequence.row < 0:
                assert table == []
                continue
            if sequence.source is not None:
                assert sequence.source in request.live
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
    held = [s.row for r in (*batch.running, *batch.finished) for s in r.live]
    held += [s.row for s in batch.dead]
    assert sorted([*held, *batch.free_rows]) == list(range(limits.max_num_seqs))
    assert len(batch.running) <= limits.max_num_seqs  # I12; the rest of it is in `Recording`


def _check_sharing(engine: Engine) -> None:
    """Tables that share a block agree on every token in it and before it, and the next token of a
    sequence goes to a block of its own, or to the last of its holders (I5).
    """
    batch, block_size = engine.scheduler.batch, engine.limits.block_size
    contents: dict[int, list[tuple[int, ...]]] = {}
    for request in batch.running:
        for sequence in request.live:
            if sequence.source is not None:
                continue
            known = sequence.token_ids[: sequence.num_computed_tokens]
            for column, block_id in enumerate(sequence.block_table):
                until = tuple(known[: (column + 1) * block_size])
                contents.setdefault(block_id, []).append(until)
    for block_id, prefixes in contents.items():
        longest = max(prefixes, key=len)
        if len(prefixes) > 1:
            shortest = min(map(len, prefixes))
            assert len({prefix[:shortest] for prefix in prefixes}) == 1, block_id
            assert longest, block_id


def _check_host(engine: Engine) -> None:
    batch = engine.scheduler.batch
    held = [{b for s in r.live for b in s.host_blocks} for r in batch.waiting]
    num_held = sum(map(len, held))
    assert num_held == len(set().union(*held))
    assert num_held + batch.host_pool.num_free == batch.host_pool.num_blocks
