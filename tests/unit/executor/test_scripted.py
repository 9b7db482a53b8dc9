"""The executor the core law rests on: it must notice every mistake that a device would hide."""

import pytest
from builders import greedy, make_limits, prompt_ids, tokens_alone

from paxserve.executor.scripted import Scripted
from paxserve.step import RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

LIMITS = make_limits(block_size=2, num_blocks=9, max_model_len=12, max_num_seqs=2)
VOCAB = 50_000


def plan(rows, *, enters=(), tables=(), step_id=1, sampling=None):
    sampling = sampling or RowSampling()
    return StepPlan(
        step_id=step_id,
        rows=tuple(RowPlan(*row) for row in rows),
        entries=tuple(RowEntry(sequence, row, 3, sampling) for sequence, row in enters),
        table_writes=tuple(TableWrite(*write) for write in tables),
    )


def run(executor, step):
    executor.submit(step)
    return executor.collect()


def executor():
    return Scripted(limits=LIMITS, vocab_size=VOCAB, step_s=0.25)


def first_step(tables=((0, 0, (3, 5)),), ids=None):
    ids = tuple(ids or prompt_ids(3))
    return plan([(7, 0, 0, 3, 1, ids)], enters=[(7, 0)], tables=tables)


def test_tokens_follow_from_what_lies_in_the_slots():
    scripted = executor()
    result = run(scripted, first_step())
    expected = tokens_alone(prompt_ids(3), 2)
    assert result.outputs == (((expected[0],), ()),)
    assert (result.step_id, result.duration_s) == (1, 0.25)
    assert (result.padded_tokens, result.padded_rows) == (3, 1)
    decode = plan([(7, 0, 3, 1, 1, ())], step_id=2)
    assert run(scripted, decode).outputs[0].tokens == (expected[1],)


def test_a_chunk_samples_nothing_and_changes_nothing():
    ids = prompt_ids(3)
    scripted = executor()
    chunk = plan([(7, 0, 0, 2, 0, tuple(ids[:2]))], enters=[(7, 0)], tables=[(0, 0, (4,))])
    assert run(scripted, chunk).outputs[0].tokens == ()
    rest = plan([(7, 0, 2, 1, 1, (ids[2],))], tables=[(0, 1, (2,))])
    assert run(scripted, rest).outputs[0].tokens == tuple(tokens_alone(ids, 1))


def test_another_token_order_or_position_gives_another_token():
    base = run(executor(), first_step()).outputs[0].tokens
    ids = prompt_ids(3)
    assert run(executor(), first_step(ids=[ids[1], ids[0], ids[2]])).outputs[0].tokens != base
    assert run(executor(), first_step(ids=[ids[0] + 1, *ids[1:]])).outputs[0].tokens != base
    assert run(executor(), first_step(tables=[(0, 0, (1, 2))])).outputs[0].tokens == base


def test_the_seed_counts_only_when_sampling():
    def token(**sampling):
        step = first_step()
        entry = step.entries[0]._replace(sampling=RowSampling(**sampling))
        return run(executor(), step._replace(entries=(entry,))).outputs[0].tokens[0]

    assert token(seed=1) == token(seed=2) == tokens_alone(prompt_ids(3), 1)[0]
    hot = tokens_alone(prompt_ids(3), 1, seed=2)[0]
    assert token(seed=2, temperature=0.5) == hot != token(seed=1, temperature=0.5)
    assert greedy().temperature == 0


def test_results_come_in_the_order_of_the_plans():
    scripted = executor()
    scripted.submit(first_step())
    scripted.submit(plan([(7, 0, 3, 1, 1, ())], step_id=2))
    assert [scripted.collect().step_id, scripted.collect().step_id] == [1, 2]


@pytest.mark.parametrize("tables", [(), ((0, 0, (3,)),), ((0, 0, (0, 3)),)])
def test_writing_the_null_block_is_an_error(tables):
    with pytest.raises(RuntimeError, match="or the null block"):
        executor().submit(first_step(tables=tables))


def test_two_rows_writing_one_slot_is_an_error():
    ids = tuple(prompt_ids(1))
    step = plan(
        [(7, 0, 0, 1, 1, ids), (8, 1, 0, 1, 1, ids)],
        enters=[(7, 0), (8, 1)],
        tables=[(0, 0, (3,)), (1, 0, (3,))],
    )
    with pytest.raises(RuntimeError, match="writes a slot twice"):
        executor().submit(step)


def test_reading_a_slot_that_nobody_wrote_is_an_error():
    step = plan([(7, 0, 2, 1, 1, (5,))], enters=[(7, 0)], tables=[(0, 0, (3, 5))])
    with pytest.raises(RuntimeError, match="sequence 7 reads a slot that was never written"):
        executor().submit(step)


@pytest.mark.parametrize("tokens", [(), (1, 2), (1, 2, 3, 4), (1, -1, 2)])
def test_a_row_must_come_with_its_tokens(tokens):
    step = plan([(7, 0, 0, 3, 1, tokens)], enters=[(7, 0)], tables=[(0, 0, (3, 5))])
    with pytest.raises(RuntimeError, match="has no 3 input tokens"):
        executor().submit(step)


def test_entering_a_row_forgets_who_was_there():
    scripted = executor()
    run(scripted, first_step())
    with pytest.raises(RuntimeError, match="has no 1 input tokens"):
        scripted.submit(plan([(8, 0, 3, 1, 1, ())], enters=[(8, 0)]))
    with pytest.raises(RuntimeError, match="or the null block"):
        scripted.submit(plan([(8, 0, 0, 1, 1, (4,))], enters=[(8, 0)]))
