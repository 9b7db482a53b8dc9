"""Every batching policy, in runs: its word on prompts and release holds, and every request ends."""

import pytest
from axes import name_of, policies
from builders import make_engine, make_limits, prompt_ids, submit, tokens_alone
from hypothesis import event, given, settings
from hypothesis import strategies as st
from invariants import check, check_idle

from paxserve.batching import split
from paxserve.batching.alternating import Alternating
from paxserve.events import Kind
from paxserve.request import State

per_batching = pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 15), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=8
)


@per_batching
@given(
    requests=REQUESTS,
    rows=st.integers(1, 4),
    extra=st.integers(0, 20),
    num_blocks=st.integers(8, 30),
)
@settings(max_examples=60)
def test_runs_within_its_limits_and_true_to_its_word(batching, requests, rows, extra, num_blocks):
    budget = max(rows, 21 if batching.whole_prompts else 1) + extra
    limits = make_limits(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=21,
        block_size=3,
        num_blocks=num_blocks,
    )
    engine = make_engine(limits, batching=batching)
    waiting = [*requests]
    served = []
    num_steps = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][2] <= num_steps or not engine.has_work):
            length, max_tokens, _ = waiting.pop(0)
            served.append(submit(engine, prompt_ids(length, len(served)), max_tokens=max_tokens))
        held = list(engine.scheduler.batch.finished)
        num_running = len(engine.scheduler.batch.running)
        engine.step()  # the executor checks budget, rows and zero-length rows
        check(engine)
        if batching.release == "with_batch" and held and num_running:
            assert set(held) <= set(engine.scheduler.batch.finished)
            assert all(r.sequence.row >= 0 and r.sequence.block_table for r in held)
        else:
            assert all(r.sequence.row == -1 and not r.sequence.block_table for r in held)
        num_steps += 1
        assert num_steps < 500, "no progress"
    check_idle(engine)
    for salt, request in enumerate(served):
        length, max_tokens, _ = requests[salt]
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(length, salt), max_tokens)
    if batching.whole_prompts:
        for plan in engine.executor.plans:
            assert all(row.num_samples == 1 for row in plan.rows)
    event(f"preempted: {any(r.num_preemptions for r in served)}")
    assert sum(e.kind is Kind.FINISHED for e in engine.events) == len(served)


@per_batching
def test_with_memory_and_rows_enough_everyone_starts_in_the_first_step(batching):
    engine = make_engine(make_limits(max_num_seqs=4), batching=batching)
    for salt in range(4):
        submit(engine, prompt_ids(4, salt), max_tokens=2)
    engine.step()
    assert [r.num_output_tokens for r in engine.requests] == [1, 1, 1, 1]


@per_batching
def test_a_row_is_free_again_as_the_policy_says(batching):
    engine = make_engine(make_limits(max_num_seqs=2), batching=batching)
    short = submit(engine, prompt_ids(3), max_tokens=1)
    submit(engine, prompt_ids(3, 1), max_tokens=6)
    late = submit(engine, prompt_ids(3, 2), max_tokens=1)
    while late.state is State.WAITING:
        engine.step()
    assert short.finished_s == 1.0
    is_turn_of_decodes = isinstance(batching, Alternating)
    expected = 6.0 if batching.release == "with_batch" else 2.0 if is_turn_of_decodes else 1.0
    assert late.first_scheduled_s == expected


@per_batching
def test_requests_enter_in_the_order_of_admission(batching):
    engine = make_engine(make_limits(max_num_seqs=2, num_blocks=9), batching=batching)
    lengths = [9, 2, 12, 3, 1, 7]
    for salt, length in enumerate(lengths):
        submit(engine, prompt_ids(length, salt), max_tokens=3)
    while engine.has_work:
        engine.step()
    entered = [e.request_id for e in engine.events if e.kind is Kind.ENTERED]
    assert list(dict.fromkeys(entered)) == [str(i) for i in range(len(lengths))]


def test_split_separates_one_token_from_more():
    engine = make_engine(make_limits(max_num_batched_tokens=6))
    first = submit(engine, prompt_ids(2), max_tokens=9)
    second = submit(engine, prompt_ids(9), max_tokens=9)
    engine.step()
    assert split([first, second]) == ([first], [second])
    assert (first.num_remaining_tokens, second.num_remaining_tokens) == (1, 5)
