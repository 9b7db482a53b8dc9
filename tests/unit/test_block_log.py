"""The log of blocks, replayed, against what the ledger counted in the same step."""

import pytest
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit

from paxserve.batching.static import Static
from paxserve.block_log import BlockLog
from paxserve.eviction.lru import Lru
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.radix import Radix
from paxserve.reservation.max import Max

SHORT = {"num_blocks": 12, "max_num_seqs": 3}
WAYS = {
    "plain": ({}, {}, {}),
    "static": ({}, {"batching": Static()}, {}),
    "reserved": ({"num_blocks": 17}, {"reservation": Max()}, {}),
    "cached": (SHORT, {"prefix_cache": HashChain(publish="planning"), "eviction": Lru()}, {}),
    "swapped": (
        SHORT | {"num_host_blocks": 9, "preempt_every_steps": 3},
        {"preemption": Swap()},
        {},
    ),
    "samples": (SHORT, {"prefix_cache": Radix(publish="after_step")}, {"n": 3, "temperature": 1.0}),
    "beams": (SHORT | {"preempt_every_steps": 4}, {}, {"beam_width": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_replaying_the_changes_gives_the_blocks_that_the_ledger_counts(way):
    sizes, chosen, params = WAYS[way]
    limits = make_limits(**sizes)
    engine = make_engine(limits, **chosen)
    engine.block_log = BlockLog(engine.scheduler.batch)
    for i, length in enumerate([9, 10, 5, 8, 3]):
        submit(engine, prompt_ids(length), max_tokens=4 + i, request_id=f"r{i}", **params)
    run_to_end(engine)
    changes = engine.block_log.changes
    assert changes == sorted(changes, key=lambda change: change[:2])  # by step, then block
    state, kinds = {}, set()
    for step, slots in zip(engine.steps, engine.ledger.steps(), strict=True):
        for change in changes:
            if change.step_id == step.step_id:
                state[change.block_id] = change
        count = {"live": 0, "held": 0, "cached": 0, "free": 0, "host": 0}
        for change in state.values():
            count[change.kind] += 1
            assert bool(change.holder) is (change.kind not in ("cached", "free"))
            is_host = change.block_id >= limits.num_blocks
            assert change.kind == "free" or is_host is (change.kind == "host")
        kinds |= {kind for kind, number in count.items() if number}
        size = limits.block_size
        assert count["cached"] * size == slots.cached
        assert count["held"] * size == slots.held
        of_running = slots.live + slots.reserved_used + slots.reserved_unused
        assert count["live"] * size == of_running + slots.tail + slots.rounding
        assert count["live"] + count["held"] == step.num_used_blocks
    wanted = {"static": "held", "cached": "cached", "swapped": "host", "samples": "cached"}
    assert wanted.get(way, "live") in kinds


def test_only_changes_are_written_down():
    engine = make_engine()
    engine.block_log = BlockLog(engine.scheduler.batch)
    submit(engine, prompt_ids(3), max_tokens=3, request_id="a")
    submit(engine, prompt_ids(3), max_tokens=1, request_id="b")
    run_to_end(engine)
    assert [tuple(change) for change in engine.block_log.changes] == [
        (1, 1, "a", "live"),
        (1, 2, "b", "live"),
        (2, 2, "", "free"),
        (3, 2, "a", "live"),
    ]
