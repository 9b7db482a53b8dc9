"""Claims about batching, memory and sharing that also hold on JAX: A1, A2, C1, C2, C4, exact steps
and blocks. (B10, recompute and swap, is in `property/test_real_law.py`.)

On `tiny`; blocks that nobody holds are full of NaN.
"""

from functools import cache

import pytest
from builders import run_to_end
from invariants import check, check_idle
from poisoned import Poisoned
from real_builders import (
    loaded,
    make_real,
    random_ids,
    real_engine,
    shared_real,
    submit_ids,
)
from real_workload import executor

from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.events import Kind
from paxserve.intake import seed_of_sample
from paxserve.placement.first_fit import FirstFit
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.radix import Radix
from paxserve.reservation.max import Max
from paxserve.sampling_params import SamplingParams

STATIC = {"batching": Static(), "reservation": Max(), "placement": FirstFit()}
NUM_STEPS = (26, 10, 18, 7, 9, 12)  # R1 to R6


def engine_on(real, **options):
    return Poisoned(real).attach(real_engine(real, loaded("tiny"), **options))


def serve_six(policies):
    """R1 to R6 on four rows; the engine, when and where each entered, and their tokens."""
    engine = engine_on(shared_real("tiny"), policies=policies)
    requests = [
        submit_ids(engine, random_ids(5 + i, seed=i), max_tokens=num_steps, request_id=f"R{i + 1}")
        for i, num_steps in enumerate(NUM_STEPS)
    ]
    run_to_end(engine)
    check_idle(engine)
    entered = {
        event.request_id: (event.step_id, event.row)
        for event in engine.events
        if event.kind is Kind.ENTERED
    }
    return engine, entered, [tuple(request.output_token_ids) for request in requests]


def test_a1_static_batching_holds_its_members_until_the_last_one_ends():
    engine, entered, _ = serve_six(STATIC)
    assert entered == {
        "R1": (1, 0), "R2": (1, 1), "R3": (1, 2), "R4": (1, 3), "R5": (27, 0), "R6": (27, 1),
    }  # fmt: skip
    released = [e.step_id for e in engine.events if e.kind is Kind.RELEASED]
    assert released[:4] == [released[0]] * 4
    first_batch, slots = engine.steps[:26], engine.ledger.steps()[:26]
    num_dead = [sum(end < step for end in (26, 10, 18, 7)) for step in range(1, 27)]
    assert [step.num_held for step in first_batch] == num_dead
    assert sum(num_dead) == (26 - 7) + (26 - 10) + (26 - 18)
    assert [slot.held for slot in slots] == [96 * dead for dead in num_dead]
    assert [step.num_rows for step in first_batch] == [4 - dead for dead in num_dead]


@pytest.mark.parametrize("policies", [{}, {"batching": Textbook()}], ids=["chunked", "textbook"])
def test_a2_continuous_batching_gives_a_row_on_at_the_boundary_of_a_step(policies):
    engine, entered, tokens = serve_six(policies)
    assert entered == {
        "R1": (1, 0), "R2": (1, 1), "R3": (1, 2), "R4": (1, 3), "R5": (8, 3), "R6": (11, 1),
    }  # fmt: skip
    assert all(step.num_rows == 4 for step in engine.steps if step.num_waiting)
    assert {step.num_held for step in engine.steps} == {0}
    assert len(engine.steps) == 26
    assert tokens == serve_six(STATIC)[2]


# C1.

SYSTEM = random_ids(1200, seed=9)
SUFFIXES = [random_ids(4 + 3 * i, seed=i) for i in range(6)]


@cache
def long_real():
    return make_real(
        loaded("tiny"), max_num_seqs=6, max_model_len=1280, max_num_batched_tokens=1280,
        num_blocks=1 + 2 * 80, token_buckets=(1280,), copies=True,
    )  # fmt: skip


@cache
def long_alone(i):
    engine = engine_on(long_real())
    request = submit_ids(engine, SYSTEM + SUFFIXES[i], max_tokens=5)
    run_to_end(engine)
    return tuple(request.output_token_ids)


@pytest.mark.parametrize(
    ("cache", "first_alone"),
    [
        (HashChain(publish="planning"), False),
        (HashChain(publish="after_step"), True),
        (Radix(publish="after_step"), True),
    ],
    ids=["all-at-once", "first-alone", "radix"],
)
def test_c1_a_system_prompt_is_stored_and_computed_once(cache, first_alone):
    """75 blocks hold it for all; six requests of 1,200 tokens each would need 450."""
    engine = engine_on(long_real(), policies={"prefix_cache": cache})
    requests = [submit_ids(engine, SYSTEM + SUFFIXES[0], max_tokens=5)]
    if first_alone:
        engine.step()
    requests += [submit_ids(engine, SYSTEM + suffix, max_tokens=5) for suffix in SUFFIXES[1:]]
    system_blocks = set()
    while engine.has_work:
        engine.step()
        check(engine)
        tables = [request.sequence.block_table[:75] for request in requests]
        holders = [tuple(table) for table in tables if len(table) == 75]
        system_blocks |= set(holders)
        pool = engine.scheduler.batch.pool
        for block_ids in set(holders):
            assert {pool.ref_count(block_id) for block_id in block_ids} == {len(holders)}
    ((*block_ids,),) = system_blocks
    assert len(set(block_ids)) == 75
    rows = [row for plan in engine.executor.plans for row in plan.rows]
    prompt_rows = [row for row in rows if row.tokens]  # the input of a decode is on the device
    assert sum(row.num_tokens for row in prompt_rows) == 1200 + sum(map(len, SUFFIXES))
    assert len(rows) - len(prompt_rows) == 6 * 4
    assert sum(step.num_cached_tokens for step in engine.steps) == 5 * 1200
    assert max(step.num_running for step in engine.steps) == 6
    for i, request in enumerate(requests):
        assert tuple(request.output_token_ids) == long_alone(i)


# C2 and C4.


def test_c2_a_sharer_copies_a_block_before_it_writes_there():
    """A prompt of 19: one whole block, and one of which each of four samples fills the rest."""
    engine = engine_on(executor("tiny", 16))
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=6, ignore_eos=True)
    request = submit_ids(engine, random_ids(19), params)
    tables, copies = [], []
    while engine.has_work:
        engine.step()
        tables.append([tuple(sequence.block_table) for sequence in request.sequences])
        copies.append([copy for plan in engine.executor.plans[-1:] for copy in plan.copies])
    shared = tables[0][0]
    assert tables[0] == [shared] * 4
    assert [len(copied) for copied in copies[:6]] == [0, 3, 0, 0, 0, 0]
    assert {copy.source for copy in copies[1]} == {shared[1]}
    assert {table[0] for table in tables[1]} == {shared[0]}
    lasts = [table[1] for table in tables[1]]
    assert len(set(lasts)) == 4
    assert set(lasts) - {shared[1]} == {copy.target for copy in copies[1]}
    for index, sequence in enumerate(request.sequences):
        alone = engine_on(executor("tiny", 16))
        params = SamplingParams(
            temperature=1.0, seed=seed_of_sample(11, index), max_tokens=6, ignore_eos=True
        )
        expected = submit_ids(alone, random_ids(19), params)
        run_to_end(alone)
        assert request.output_of(sequence) == list(expected.output_token_ids)


def saved_share(width):
    """Of the blocks that beams would need without sharing, those that sharing saves."""
    engine = engine_on(executor("tiny", 16))
    params = SamplingParams(beam_width=width, temperature=0.0, max_tokens=36, ignore_eos=True)
    submit_ids(engine, random_ids(20), params)
    num_used = num_saved = 0
    while engine.has_work:
        engine.step()
        pool = engine.scheduler.batch.pool
        num_used += pool.num_held
        num_saved += pool.num_extra_refs
    return num_saved / (num_used + num_saved)


def test_c4_beams_save_the_more_blocks_the_wider_they_are():
    """Beyond the prompt's one whole block: beams have a past in common too."""
    shares = {width: saved_share(width) for width in (2, 4, 6)}
    assert shares[2] < shares[4] < shares[6]
    prompt_alone = [(width - 1) / (width * 3) for width in shares]  # one block of at least three
    assert all(share > least for share, least in zip(shares.values(), prompt_alone, strict=True))
    assert shares[6] > 0.35
