"""The executor the core law rests on: it must notice every mistake that a device would hide."""

import pytest
from builders import greedy, make_limits, prompt_ids, tokens_alone, top_alone

from paxserve.executor.scripted import Scripted
from paxserve.step import BlockCopy, RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

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


# Samples of one prompt: a fork, and copies on write.

FORK_LIMITS = make_limits(block_size=4, num_blocks=12, max_model_len=24, max_num_seqs=4)


def forked(num_samples=4, *, unwritten=None, copies=((2, 4), (2, 5), (2, 6))):
    """The plans of `num_samples` samples of a prompt of 6 tokens in blocks 1 and 2, two tokens
    each: the prompt's last step runs in all rows, then all but the first copy block 2.
    """
    ids, places = prompt_ids(6), range(num_samples)
    sampling = [RowSampling(temperature=1.0, seed=70 + j) for j in places]
    prompt = StepPlan(
        step_id=1,
        rows=tuple(
            RowPlan(j, j, 0, 6, 1, tuple(ids)) if j == 0 else RowPlan(j, j, 5, 1, 1, (ids[5],))
            for j in places
        ),
        entries=tuple(RowEntry(j, j, 6, sampling[j]) for j in places),
        table_writes=tuple(TableWrite(j, 0, (1, 2)) for j in places),
        unwritten=tuple(places)[1:] if unwritten is None else unwritten,
    )
    decode = StepPlan(
        step_id=2,
        rows=tuple(RowPlan(j, j, 6, 1, 1, ()) for j in places),
        table_writes=tuple(TableWrite(j, 1, (3 + j,)) for j in places if j),
        copies=tuple(BlockCopy(*copy) for copy in copies),
    )
    return prompt, decode


def fork_executor():
    return Scripted(limits=FORK_LIMITS, vocab_size=VOCAB)


def test_each_sample_of_a_fork_has_the_tokens_it_has_alone():
    scripted = fork_executor()
    first, second = (run(scripted, step).outputs for step in forked())
    found = [[*a.tokens, *b.tokens] for a, b in zip(first, second, strict=True)]
    assert found == [tokens_alone(prompt_ids(6), 2, seed=70 + j) for j in range(4)]
    assert len({tuple(tokens) for tokens in found}) == 4


def test_rows_of_a_fork_that_all_write_are_an_error():
    with pytest.raises(RuntimeError, match="writes a slot twice"):
        fork_executor().submit(forked(unwritten=())[0])


def test_a_fork_without_its_copies_is_an_error():
    """Two samples then write one slot, or read a block that nobody filled."""
    scripted = fork_executor()
    prompt, decode = forked(copies=())
    run(scripted, prompt)
    with pytest.raises(RuntimeError, match="reads a slot that was never written"):
        scripted.submit(decode)
    scripted = fork_executor()
    run(scripted, prompt)
    with pytest.raises(RuntimeError, match="writes a slot twice"):
        scripted.submit(decode._replace(table_writes=()))


def test_a_copy_of_another_block_gives_other_tokens():
    scripted = fork_executor()
    for step in forked(copies=((1, 4), (2, 5), (2, 6))):
        outputs = run(scripted, step).outputs
    expected = [tokens_alone(prompt_ids(6), 2, seed=70 + j)[1] for j in range(4)]
    found = [output.tokens[0] for output in outputs]
    assert [a == b for a, b in zip(found, expected, strict=True)] == [True, False, True, True]


def test_rows_may_all_be_unwritten_once_their_tokens_are_there():
    scripted = fork_executor()
    prompt, _ = forked()
    run(scripted, prompt)
    again = prompt._replace(rows=prompt.rows[1:], unwritten=(0, 1, 2), entries=prompt.entries[1:])
    found = [output.tokens[0] for output in run(scripted, again).outputs]
    assert found == [tokens_alone(prompt_ids(6), 1, seed=70 + j)[0] for j in (1, 2, 3)]


@pytest.mark.parametrize("fault", ["missing", "other"])
def test_an_unwritten_row_whose_token_is_not_there_is_an_error(fault):
    prompt, _ = forked()
    if fault == "missing":
        step = prompt._replace(unwritten=(0, 1, 2, 3), rows=(prompt.rows[1], *prompt.rows[1:]))
    else:
        wrong = prompt.rows[2]._replace(tokens=(1,))
        step = prompt._replace(rows=(*prompt.rows[:2], wrong, prompt.rows[3]))
    with pytest.raises(RuntimeError, match="unwritten, but its slot holds another token"):
        fork_executor().submit(step)


def test_an_unwritten_row_of_several_tokens_is_an_error():
    with pytest.raises(RuntimeError, match="must have one token"):
        fork_executor().submit(forked(unwritten=(0, 1, 2))[0])


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (((2, 4), (2, 4)), "two blocks are copied to one target"),
        (((2, 4), (4, 5)), r"blocks \[4\] are source and target"),
        (((0, 4),), "not in its pool"),
        (((2, 0),), "not in its pool"),
        (((2, 12),), "not in its pool"),
    ],
)
def test_wrong_copies_are_errors(copies, message):
    scripted = fork_executor()
    prompt, decode = forked(copies=copies)
    run(scripted, prompt)
    with pytest.raises(RuntimeError, match=message):
        scripted.submit(decode)


# Swaps.


def swapped(*, step_out=None, step_in=None):
    """Sequence 7 in block 3 leaves for host block 1, 8 takes its block and row in that very step,
    then 7 comes back into block 4.
    """
    ids = {7: tuple(prompt_ids(3)), 8: tuple(prompt_ids(2, salt=1))}
    enter = {s: (RowEntry(s, 0, len(ids[s]), RowSampling()),) for s in ids}
    token = tokens_alone(ids[7], 1)[0]
    first = StepPlan(1, (RowPlan(7, 0, 0, 3, 1, ids[7]),), enter[7], (TableWrite(0, 0, (3,)),))
    out = StepPlan(
        2,
        (RowPlan(8, 0, 0, 2, 1, ids[8]),),
        enter[8],
        (TableWrite(0, 0, (3,)),),
        swap_out=(BlockCopy(3, 1),),
    )
    back = StepPlan(
        3,
        (RowPlan(7, 0, 3, 1, 1, (token,)),),
        enter[7],
        (TableWrite(0, 0, (4,)),),
        swap_in=(BlockCopy(1, 4),),
    )
    return first, out._replace(**(step_out or {})), back._replace(**(step_in or {}))


def swap_executor(*, num_host_blocks=2, poison=True):
    return Scripted(
        limits=FORK_LIMITS, vocab_size=VOCAB, num_host_blocks=num_host_blocks, poison=poison
    )


def test_a_swapped_sequence_goes_on_as_if_it_had_stayed():
    scripted = swap_executor()
    results = [run(scripted, step) for step in swapped()]
    tokens = [result.outputs[0].tokens[0] for result in results]
    sevens = tokens_alone(prompt_ids(3), 2)
    assert tokens == [sevens[0], *tokens_alone(prompt_ids(2, salt=1), 1), sevens[1]]
    assert [result.swap_bytes for result in results] == [0, 4 * 8, 4 * 8]


def test_bytes_count_both_ways():
    scripted = swap_executor()
    first, out, _ = swapped()
    run(scripted, first)
    both = out._replace(swap_in=(BlockCopy(1, 5), BlockCopy(0, 6)))
    assert run(scripted, both).swap_bytes == 3 * 4 * 8


@pytest.mark.parametrize("stale", ["device", "host"])
def test_poison_shows_a_resume_on_a_block_that_was_not_copied_back(stale):
    """Without poison the stale block still holds the right tokens, and nobody notices."""
    ids = tuple(prompt_ids(2, salt=1))
    elsewhere = {"table_writes": (TableWrite(0, 0, (5,)),)}
    steps = swapped(step_out=elsewhere)
    if stale == "device":
        back = {"swap_in": (), "table_writes": (TableWrite(0, 0, (3,)),)}
        steps = swapped(step_out=elsewhere, step_in=back)
    else:
        again = steps[2]._replace(step_id=4, swap_in=(BlockCopy(1, 6),))
        steps = (*steps[:2], steps[2], again._replace(table_writes=(TableWrite(0, 0, (6,)),)))
    unaware = swap_executor(poison=False)
    found = [run(unaware, step).outputs[0].tokens[0] for step in steps]
    assert (found[1], found[-1]) == (tokens_alone(ids, 1)[0], tokens_alone(prompt_ids(3), 2)[1])
    scripted = swap_executor()
    for step in steps[:-1]:
        run(scripted, step)
    with pytest.raises(RuntimeError, match="sequence 7 reads a slot that was never written"):
        scripted.submit(steps[-1])


@pytest.mark.parametrize(
    "changed",
    [
        {"swap_out": (BlockCopy(3, 2),)},
        {"swap_out": (BlockCopy(3, -1),)},
        {"swap_out": (BlockCopy(0, 1),)},
        {"swap_in": (BlockCopy(2, 4),)},
        {"swap_in": (BlockCopy(1, 0),)},
    ],
)
def test_swaps_outside_the_pools_are_errors(changed):
    scripted = swap_executor()
    first, out, _ = swapped(step_out=changed)
    run(scripted, first)
    with pytest.raises(RuntimeError, match="not in its pool"):
        scripted.submit(out)


@pytest.mark.parametrize("num_host_blocks", [-1, 1.5, None])
def test_a_host_pool_of_no_size_is_refused(num_host_blocks):
    with pytest.raises(ValueError, match="num_host_blocks must be an integer >= 0"):
        swap_executor(num_host_blocks=num_host_blocks)


# Log-probabilities.


def logprobs_of(*, vocab_size=VOCAB, **sampling):
    scripted = Scripted(limits=LIMITS, vocab_size=vocab_size)
    step = first_step()
    entry = step.entries[0]._replace(sampling=RowSampling(**sampling))
    return run(scripted, step._replace(entries=(entry,))).outputs[0]


def test_logprobs_follow_from_what_lies_in_the_slots():
    output = logprobs_of(num_logprobs=20)
    (logprobs,) = output.logprobs
    expected = top_alone(prompt_ids(3), 20)
    assert list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)) == expected
    assert (logprobs.top_ids[0], logprobs.rank) == (output.tokens[0], 1)
    assert logprobs.logprob == logprobs.top_logprobs[0] < 0
    assert len(set(logprobs.top_ids)) == 20
    assert list(logprobs.top_logprobs) == sorted(set(logprobs.top_logprobs), reverse=True)


def test_logprobs_do_not_know_the_seed_and_rank_the_token_that_was_drawn():
    greedy_output = logprobs_of(num_logprobs=5, vocab_size=30)
    hot = logprobs_of(num_logprobs=5, vocab_size=30, temperature=1.0, seed=3)
    (best,), (drawn,) = greedy_output.logprobs, hot.logprobs
    assert (drawn.top_ids, drawn.top_logprobs) == (best.top_ids, best.top_logprobs)
    everything = top_alone(prompt_ids(3), 30, vocab_size=30)
    assert drawn.rank > 1
    assert everything[drawn.rank - 1] == (hot.tokens[0], drawn.logprob)


def test_only_rows_that_ask_have_logprobs():
    ids = tuple(prompt_ids(2))
    step = plan(
        [(7, 0, 0, 2, 1, ids), (8, 1, 0, 2, 1, ids)], tables=[(0, 0, (1,)), (1, 0, (2,))]
    )._replace(
        entries=(
            RowEntry(7, 0, 2, RowSampling(num_logprobs=0)),
            RowEntry(8, 1, 2, RowSampling()),
        )
    )
    asked, silent = run(executor(), step).outputs
    assert asked.tokens == silent.tokens == tuple(tokens_alone(ids, 1))
    assert silent.logprobs == ()
    (logprobs,) = asked.logprobs
    assert (logprobs.rank, logprobs.top_ids, logprobs.top_logprobs) == (1, (), ())


def test_there_are_no_more_best_ids_than_tokens():
    (logprobs,) = logprobs_of(num_logprobs=20, vocab_size=3).logprobs
    assert sorted(logprobs.top_ids) == [0, 1, 2]
