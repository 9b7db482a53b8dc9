"""The shape of a step, counted by hand from plans."""

import pytest
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit
from hypothesis import given
from hypothesis import strategies as st

from paxserve.step import BlockCopy, RowPlan, StepPlan
from paxserve.step_shape import StepShape, chunk, decodes, prompt, shape_of, together


def rows(*spans):
    """(first position, tokens, samples) each."""
    return tuple(
        RowPlan(number, number, first, length, samples, ())
        for number, (first, length, samples) in enumerate(spans)
    )


def test_decodes_read_their_context_and_their_own_token():
    plan = StepPlan(0, rows((9, 1, 1), (0, 1, 1), (19, 1, 1)))
    assert shape_of(plan) == decodes(3, 10 + 1 + 20) == StepShape(3, 3, 3, 3, 3, 3, 31)


def test_plans_of_a_scheduler_are_counted_like_their_rows():
    """However it keeps them."""
    engine = make_engine(make_limits(max_num_batched_tokens=8))
    for length in (3, 9, 5, 12, 4):
        submit(engine, prompt_ids(length), max_tokens=4)
    run_to_end(engine)
    plans = engine.executor.plans
    shapes = [shape_of(plan) for plan in plans]
    assert any(shape.num_chunks for shape in shapes)
    assert any(shape.num_decodes and shape.num_chunks for shape in shapes)
    assert any(shape.num_decodes == shape.num_rows > 1 for shape in shapes)
    for plan, shape in zip(plans, shapes, strict=True):
        pieces = [
            chunk(row.first_position, row.num_tokens, samples=row.num_samples > 0)
            for row in plan.rows
        ]
        assert shape == together(*pieces)


def test_a_prompt_sees_itself_and_what_is_before_it():
    assert shape_of(StepPlan(0, rows((0, 4, 1)))) == prompt(4)
    assert prompt(4).chunk_pairs == 1 + 2 + 3 + 4
    second = shape_of(StepPlan(0, rows((4, 3, 0))))
    assert second.chunk_pairs == 5 + 6 + 7
    assert (second.chunk_context, second.chunk_tokens, second.num_samples) == (7, 3, 0)


def test_a_step_of_both():
    shape = shape_of(StepPlan(0, rows((9, 1, 1), (0, 4, 1), (4, 3, 0), (2, 1, 0))))
    assert shape == StepShape(
        num_tokens=9, num_rows=4, padded_tokens=9, padded_rows=4, num_samples=2,
        num_decodes=2, decode_context=10 + 3, num_chunks=2, chunk_tokens=7,
        chunk_context=4 + 7, chunk_pairs=10 + 18,
    )  # fmt: skip


def test_a_chunk_of_one_token_is_a_decode():
    assert shape_of(StepPlan(0, rows((7, 1, 1)))) == decodes(1, 8) == chunk(7, 1, samples=True)
    assert prompt(1) == decodes(1, 1)


def test_shapes_without_a_plan_are_those_of_plans():
    spans = [(9, 1, 1), (0, 4, 1), (4, 3, 0), (2, 1, 0)]
    apart = [chunk(first, length, samples=bool(samples)) for first, length, samples in spans]
    assert together(*apart) == shape_of(StepPlan(0, rows(*spans)))
    assert together(decodes(2, 9), decodes(1, 4)) == decodes(3, 13)


@given(st.integers(2, 60), st.integers(1, 59), st.integers(0, 50))
def test_a_prompt_in_two_chunks_has_the_pairs_of_the_whole(length, cut, first):
    cut = min(cut, length - 1)
    parts = [shape_of(StepPlan(0, rows(span))) for span in
             [(first, cut, 0), (first + cut, length - cut, 1)]]  # fmt: skip
    whole = shape_of(StepPlan(0, rows((first, length, 1))))

    def pairs(shape):  # a chunk of one token counts as a decode, whose pairs are its context
        return shape.chunk_pairs + shape.decode_context

    assert sum(map(pairs, parts)) == pairs(whole)


def test_what_is_moved_is_counted_with_any_rows():
    moves = {"copies": (BlockCopy(1, 2),), "swap_in": (BlockCopy(3, 4),) * 2,
             "swap_out": (BlockCopy(5, 6),) * 3}  # fmt: skip
    for given_rows in (rows((0, 4, 1)), rows((9, 1, 1)), ()):
        shape = shape_of(StepPlan(0, given_rows, **moves))
        assert (shape.num_copied, shape.num_swapped) == (1, 5)


@pytest.mark.parametrize("given_rows", [rows((0, 4, 1)), rows((9, 1, 1))])
def test_padding_is_what_runs_and_changes_nothing_else(given_rows):
    exact = shape_of(StepPlan(0, given_rows))
    padded = shape_of(StepPlan(0, given_rows), padded_tokens=64, padded_rows=8)
    assert padded == exact._replace(padded_tokens=64, padded_rows=8)
