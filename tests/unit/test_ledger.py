"""Slot classes, worked by hand, at every step."""

import pytest
from axes import combinations
from builders import make_engine, make_limits, make_scheduler, prompt_ids, run_to_end, submit

from paxserve.batching.static import Static
from paxserve.ledger import Ledger, SlotCounts
from paxserve.placement.buddy import Buddy
from paxserve.placement.first_fit import FirstFit
from paxserve.placement.paged import Paged
from paxserve.reservation.max import Max
from paxserve.reservation.on_demand import OnDemand
from paxserve.reservation.oracle import Oracle
from paxserve.reservation.pow2 import Pow2


def counts(**classes):
    return SlotCounts(**classes)


def test_a_reservation_of_2048_of_which_300_are_used():
    limits = make_limits(
        block_size=1,
        max_model_len=2048,
        num_blocks=2049,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
    )
    engine = make_engine(limits, reservation=Max(), placement=FirstFit())
    submit(engine, prompt_ids(300), max_tokens=1)
    run_to_end(engine)
    assert engine.ledger.steps() == [counts(live=300, reserved_unused=1748, null=1)]
    assert pytest.approx(0.854, abs=5e-4) == 1748 / 2048


def test_300_tokens_in_blocks_of_16_waste_4():
    limits = make_limits(
        block_size=16,
        max_model_len=2048,
        num_blocks=129,
        max_num_seqs=1,
        max_num_batched_tokens=512,
    )
    engine = make_engine(limits)
    submit(engine, prompt_ids(300), max_tokens=1)
    run_to_end(engine)
    (only,) = engine.ledger.steps()
    assert only == counts(live=300, tail=4, free=2048 - 304, null=16)
    assert only.live + only.tail == 304


def test_paged_memory_holds_exactly_the_blocks_in_use_at_every_step():
    limits = make_limits(block_size=4, num_blocks=9, max_num_seqs=1)
    engine = make_engine(limits)
    submit(engine, prompt_ids(3), max_tokens=7)
    run_to_end(engine)
    expected = []
    for live in range(3, 10):  # 3 + 7 - 1 slots in the last step
        held = 4 * -(-live // 4)
        expected.append(counts(live=live, tail=held - live, free=32 - held, null=4))
    assert engine.ledger.steps() == expected


def test_chunks_of_those_that_ran_before_are_not_taken_for_decodes():
    limits = make_limits(block_size=4, num_blocks=9, max_num_seqs=1, max_num_batched_tokens=3)
    engine = make_engine(limits)
    submit(engine, prompt_ids(8), max_tokens=3)
    run_to_end(engine)
    assert [step.live for step in engine.ledger.steps()] == [3, 6, 8, 9, 10]
    assert [step.tail for step in engine.ledger.steps()] == [1, 2, 0, 3, 2]


def test_full_reservations_are_split_by_what_came_to_be_used():
    """Pool of 16 slots, two requests of at most 8: A uses 3 + 4 - 1 = 6, B uses 2 + 2 - 1 = 3."""
    limits = make_limits(
        block_size=1, num_blocks=17, max_model_len=8, max_num_seqs=2, max_num_batched_tokens=8
    )
    engine = make_engine(limits, reservation=Max(), placement=FirstFit())
    submit(engine, prompt_ids(3), max_tokens=4)
    submit(engine, prompt_ids(2), max_tokens=2)
    run_to_end(engine)
    assert engine.ledger.steps() == [
        # live A + B, used later A 6 - 3 and B 3 - 2, never used A 8 - 6 and B 8 - 3
        counts(live=5, reserved_used=4, reserved_unused=7, null=1),
        counts(live=7, reserved_used=2, reserved_unused=7, null=1),
        counts(live=5, reserved_used=1, reserved_unused=2, free=8, null=1),
        counts(live=6, reserved_used=0, reserved_unused=2, free=8, null=1),
    ]


@pytest.mark.parametrize(
    ("reservation", "promised"), [(Max(), 30), (Pow2(), 5 + 8), (Oracle(), 5 + 6 - 1)], ids=str
)
def test_orcas_reservations_over_buddies(reservation, promised):
    """Prompt 5, output 6 of slots 1 to 64: runs of 32, 16 and 16, of which 10 come to be used."""
    limits = make_limits(block_size=1, num_blocks=65, max_model_len=30, max_num_seqs=1)
    engine = make_engine(limits, reservation=reservation, placement=Buddy())
    submit(engine, prompt_ids(5), max_tokens=6)
    run_to_end(engine)
    held = 32 if promised > 16 else 16
    assert engine.ledger.steps() == [
        counts(
            live=live,
            reserved_used=10 - live,
            reserved_unused=promised - 10,
            rounding=held - promised,
            free=64 - held,
            null=1,
        )
        for live in range(5, 11)
    ]


def test_the_tail_is_what_rounds_a_reservation_up_to_blocks():
    """max_model_len 6 in blocks of 4: 8 slots, 2 of them tail; 2 + 3 - 1 = 4 are used."""
    limits = make_limits(block_size=4, num_blocks=4, max_model_len=6, max_num_seqs=1)
    engine = make_engine(limits, reservation=Max())
    submit(engine, prompt_ids(2), max_tokens=3)
    run_to_end(engine)
    shared = {"reserved_unused": 2, "tail": 2, "free": 4, "null": 4}
    assert engine.ledger.steps() == [
        counts(live=2, reserved_used=2, **shared),
        counts(live=3, reserved_used=1, **shared),
        counts(live=4, reserved_used=0, **shared),
    ]


def test_static_batching_holds_the_slots_of_its_dead():
    """A ends after 2 steps with 3 slots in 2 blocks, B after 4 with 5. C waits for both."""
    limits = make_limits(block_size=2, num_blocks=9, max_num_seqs=2, max_model_len=8)
    engine = make_engine(limits, batching=Static())
    submit(engine, prompt_ids(2), max_tokens=2)
    submit(engine, prompt_ids(2), max_tokens=4)
    submit(engine, prompt_ids(2), max_tokens=1)
    run_to_end(engine)
    assert engine.ledger.steps() == [
        counts(live=4, free=12, null=2),
        counts(live=6, tail=2, free=8, null=2),
        counts(live=4, held=4, free=8, null=2),
        counts(live=5, tail=1, held=4, free=6, null=2),
        counts(live=2, free=14, null=2),
    ]


def test_an_aborted_request_s_promise_is_settled_at_once_even_while_it_is_held():
    limits = make_limits(block_size=1, num_blocks=17, max_model_len=8, max_num_seqs=2)
    engine = make_engine(limits, batching=Static(), reservation=Max())
    aborted = submit(engine, prompt_ids(3), max_tokens=5)
    submit(engine, prompt_ids(2), max_tokens=3)
    engine.step()
    assert engine.ledger.steps() == [counts(live=5, reserved_used=11, null=1)]  # both may use all
    engine.abort(aborted.request_id)
    assert engine.ledger.steps() == [counts(live=5, reserved_used=6, reserved_unused=5, null=1)]
    run_to_end(engine)
    assert engine.ledger.steps() == [
        counts(live=5, reserved_used=2, reserved_unused=9, null=1),
        counts(live=3, reserved_used=1, reserved_unused=4, held=8, null=1),
        counts(live=4, reserved_used=0, reserved_unused=4, held=8, null=1),
    ]


def fragmented(placement):
    """Pool of 12 slots: three requests of 4 slots each, the middle one ends; a fourth needs 6."""
    limits = make_limits(block_size=1, num_blocks=13, max_model_len=12, max_num_seqs=4)
    engine = make_engine(limits, placement=placement, reservation=FixedPromise())
    submit(engine, prompt_ids(3), max_tokens=2)  # promised 4; done after 2 steps
    submit(engine, prompt_ids(1), max_tokens=4)
    submit(engine, prompt_ids(3), max_tokens=2)
    waits = submit(engine, prompt_ids(4), max_tokens=3)
    engine.step()
    engine.step()
    engine.step()
    return engine, waits


class FixedPromise:
    """Promise the prompt and all the output that was asked for: known here, in a test."""

    grows = False
    needs_true_lengths = False

    def num_tokens(self, request, *, num_needed, limits):
        return request.max_known_tokens - 1


def test_free_slots_in_runs_too_short_for_the_head_are_fragmentation():
    """After step 2: slots 1-4 and 9-12 are free around the 4 of the second request."""
    engine, waits = fragmented(FirstFit())
    assert waits.state == "waiting"
    third = engine.ledger.steps()[2]
    assert third == counts(live=3, reserved_used=1, free_unfit=8, null=1)
    assert engine.scheduler.batch.pool.free_space.largest_free_run() == 4
    run_to_end(engine)
    assert waits.num_output_tokens == 3


def test_paged_memory_serves_what_contiguous_memory_must_refuse():
    engine, waits = fragmented(Paged())
    assert waits.state == "running"
    third = engine.ledger.steps()[2]
    assert third == counts(live=3 + 4, reserved_used=1 + 2, free=2, null=1)


def test_preempted_requests_keep_their_promise_classes_apart():
    limits = make_limits(block_size=2, num_blocks=5, max_model_len=8, max_num_seqs=2)
    engine = make_engine(limits)
    first = submit(engine, prompt_ids(3), max_tokens=4)
    second = submit(engine, prompt_ids(2), max_tokens=3)
    run_to_end(engine)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert engine.ledger.steps() == [
        counts(live=5, tail=1, free=2, null=2),
        counts(live=7, tail=1, null=2),
        counts(live=5, tail=1, free=2, null=2),
        counts(live=6, free=2, null=2),
        counts(live=4, free=4, null=2),
    ]


@pytest.mark.parametrize(
    ("batching", "reservation", "placement"), combinations("batching", "reservation", "placement")
)
def test_the_classes_sum_to_the_pool_in_every_step(batching, reservation, placement):
    limits = make_limits(
        block_size=3, num_blocks=9, max_model_len=20, max_num_seqs=3, max_num_batched_tokens=20
    )
    engine = make_engine(limits, batching=batching, reservation=reservation, placement=placement)
    for salt in range(7):
        submit(engine, prompt_ids(1 + 2 * salt, salt), max_tokens=7 - salt)
    run_to_end(engine)
    steps = engine.ledger.steps()
    assert len(steps) == len(engine.steps) > 0
    assert {sum(step) for step in steps} == {27}
    assert min(min(step) for step in steps) >= 0
    assert all(step.null == 3 for step in steps)
    if isinstance(reservation, OnDemand):
        assert all(step.reserved_unused == 0 for step in steps)
    for step, record, plan in zip(steps, engine.steps, engine.executor.plans, strict=True):
        assert step.live >= record.num_tokens == plan.num_tokens


def test_a_pool_that_lost_a_block_is_reported_with_every_term():
    scheduler = make_scheduler()
    ledger = Ledger(scheduler.batch)
    assert ledger.record() == counts(free=64, null=4)
    scheduler.batch.pool.free_space.take(1)
    with pytest.raises(RuntimeError, match=r"sum to 64, the pool has 17 blocks of 4.*free=60"):
        ledger.record()


def test_unfit_is_asked_with_all_that_the_head_needs_also_when_nothing_is_promised():
    limits = make_limits(block_size=1, num_blocks=7, max_model_len=8)
    engine = make_engine(limits, placement=FirstFit())
    batch = engine.scheduler.batch
    short = batch.pool.take(2)
    batch.pool.take(4)
    batch.pool.release(short)
    submit(engine, prompt_ids(3))
    assert engine.ledger._num_unfit_blocks() == 2


def test_unfit_is_asked_with_the_longest_table_of_a_group():
    """Each of its three samples has a run of its own: one of 5 fits, though 15 do not."""
    limits = make_limits(block_size=1, num_blocks=19, max_model_len=6)
    engine = make_engine(limits, reservation=Max(), placement=FirstFit())
    pool = engine.scheduler.batch.pool
    pool.take(10)
    held = pool.take(1)
    submit(engine, prompt_ids(5), n=3, temperature=1.0)
    assert engine.ledger._num_unfit_blocks() == 0  # 7 in a row, where a table needs 6
    more = pool.take(2)
    pool.release(held)
    assert (more, engine.ledger._num_unfit_blocks()) == ([12, 13], 6)  # runs of 1 and 5
