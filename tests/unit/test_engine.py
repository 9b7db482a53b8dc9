"""The loop: what a user sees of requests that end in every way there is."""

import pytest
from axes import name_of, policies
from builders import (
    VOCAB_SIZE,
    Dictated,
    Letters,
    make_engine,
    make_limits,
    prompt_ids,
    run_to_end,
    submit,
    tokens_alone,
)
from invariants import check, check_idle

from paxserve.batching.static import Static
from paxserve.events import UNASKED, Kind
from paxserve.intake import InvalidRequest
from paxserve.request import FinishReason, Origin, State
from paxserve.reservation.oracle import Oracle

LETTERS = Letters([b"a", b"b", b"c", b"d", b"</s>"])
A, B, C, D, END = range(5)


def dictated(*outputs, tokenizer=LETTERS, **options):
    """An engine whose n-th request will be given these tokens."""
    return make_engine(
        executor=Dictated(outputs),
        vocab_size=LETTERS.vocab_size,
        eos_token_ids=(END,),
        tokenizer=tokenizer,
        **options,
    )


def serve(*tokens, **params):
    """One request that is given these tokens, run to its end; its output."""
    engine = dictated(tokens)
    request = submit(engine, [A], **params)
    run_to_end(engine)
    check_idle(engine)
    return engine.output(request), request


def test_a_request_ends_at_max_tokens():
    output, request = serve(A, B, C, D, max_tokens=3)
    assert output.outputs[0].token_ids == [A, B, C]
    assert output.outputs[0].text == "abc"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
    assert output.finished
    assert (output.prompt_token_ids, output.error) == ([A], None)
    assert (output.metrics.first_token_time, output.metrics.finished_time) == (1.0, 3.0)
    assert request.sequence.token_times_s == [1.0, 2.0, 3.0]


def test_a_request_ends_where_the_model_s_length_does():
    limits = make_limits(max_model_len=8)
    engine = make_engine(limits)
    request = submit(engine, prompt_ids(5), max_tokens=None)
    run_to_end(engine)
    assert list(request.output_token_ids) == tokens_alone(prompt_ids(5), 3)
    assert request.finish_reason is FinishReason.LENGTH


def test_the_model_s_end_token_ends_it_and_is_no_text():
    output, _ = serve(A, END, B, max_tokens=9)
    (only,) = output.outputs
    assert (only.token_ids, only.text) == ([A, END], "a")
    assert (only.finish_reason, only.stop_reason) == ("stop", None)


def test_an_own_end_token_ends_it_and_is_named():
    (only,) = serve(A, C, B, max_tokens=9, stop_token_ids=[C])[0].outputs
    assert (only.token_ids, only.text) == ([A, C], "a")
    assert (only.finish_reason, only.stop_reason) == ("stop", C)


def test_the_end_token_as_the_last_token_is_a_stop_and_not_a_length():
    (only,) = serve(A, END, max_tokens=2)[0].outputs
    assert only.finish_reason == "stop"


def test_ignore_eos_ignores_the_model_s_end_token_only():
    (only,) = serve(END, A, C, B, max_tokens=4, ignore_eos=True, stop_token_ids=[C])[0].outputs
    assert (only.token_ids, only.stop_reason) == ([END, A, C], C)


def test_end_tokens_do_not_end_it_before_min_tokens():
    (only,) = serve(END, END, END, B, max_tokens=4, min_tokens=2)[0].outputs
    assert only.token_ids == [END, END, END]  # the third is the first that may end it
    assert only.finish_reason == "stop"
    (only,) = serve(END, END, max_tokens=2, min_tokens=2)[0].outputs
    assert (only.token_ids, only.finish_reason) == ([END, END], "length")


def test_a_stop_string_ends_it_and_is_cut():
    (only,) = serve(A, B, C, D, max_tokens=9, stop="bc")[0].outputs
    assert (only.token_ids, only.text) == ([A, B, C], "a")
    assert (only.finish_reason, only.stop_reason) == ("stop", "bc")


def test_a_stop_string_complete_in_the_last_token_is_a_stop():
    (only,) = serve(A, B, max_tokens=2, stop=["b"])[0].outputs
    assert (only.finish_reason, only.stop_reason, only.text) == ("stop", "b", "a")


def test_logits_that_are_not_finite_end_one_request_and_not_its_mates():
    engine = dictated((A, -1), (A, B, C), (D, C, B))
    requests = [submit(engine, [A], max_tokens=3) for _ in range(3)]
    run_to_end(engine)
    check_idle(engine)
    assert [r.finish_reason for r in requests] == ["error", "length", "length"]
    assert "request 0: the model's logits are not finite" in requests[0].error
    assert [list(r.output_token_ids) for r in requests] == [[A], [A, B, C], [D, C, B]]
    output = engine.output(requests[0])
    assert (output.error, output.outputs[0].finish_reason) == (requests[0].error, "error")


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
def test_a_request_that_outgrows_the_pool_fails_alone(batching):
    limits = make_limits(block_size=2, num_blocks=5, max_model_len=20, max_num_seqs=3)
    engine = make_engine(limits, batching=batching)
    big = submit(engine, prompt_ids(4), max_tokens=12)  # 15 slots, the pool has 8
    small = [submit(engine, prompt_ids(2, salt), max_tokens=4) for salt in (1, 2)]
    run_to_end(engine)
    check_idle(engine)
    assert big.finish_reason is FinishReason.ERROR
    assert "outgrew the KV pool: its next token needs 5 blocks, the pool has 4 of 2" in big.error
    assert list(big.output_token_ids) == tokens_alone(prompt_ids(4), 5)
    for salt, request in zip((1, 2), small, strict=True):
        assert list(request.output_token_ids) == tokens_alone(prompt_ids(2, salt), 4)


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
@pytest.mark.parametrize("length", [30, 31, 32, 33, 34, 99])
def test_a_prompt_around_the_size_of_the_pool_never_starves_those_behind_it(batching, length):
    limits = make_limits(num_blocks=9, max_model_len=100, max_num_batched_tokens=100)  # 32 slots
    engine = make_engine(limits, batching=batching)
    if length > 32:
        with pytest.raises(InvalidRequest, match=f"{length} tokens, the KV pool holds 32"):
            submit(engine, prompt_ids(length), max_tokens=4)
    else:
        submit(engine, prompt_ids(length), max_tokens=4)
    later = submit(engine, prompt_ids(3, 1), max_tokens=4)
    run_to_end(engine, max_steps=20)
    assert list(later.output_token_ids) == tokens_alone(prompt_ids(3, 1), 4)
    if length <= 32:
        first = engine.requests[0]
        assert first.num_output_tokens == min(4, 32 - length + 1)
        assert first.finish_reason == ("length" if length + 3 <= 32 else "error")


def test_a_bad_request_leaves_the_engine_as_it_was_but_for_an_event():
    engine = make_engine()
    mate = submit(engine, prompt_ids(3), max_tokens=4)
    engine.step()
    for token_ids in ([], [VOCAB_SIZE], prompt_ids(32)):
        with pytest.raises(InvalidRequest):
            submit(engine, token_ids, request_id="bad")
    assert engine.requests == [mate]
    assert list(engine.scheduler.batch.requests) == [mate.request_id]
    rejected = [e for e in engine.events if e.kind is Kind.REJECTED]
    assert [e.request_id for e in rejected] == ["bad"] * 3
    assert "empty" in rejected[0].detail
    check(engine)
    run_to_end(engine)
    assert list(mate.output_token_ids) == tokens_alone(prompt_ids(3), 4)


def test_an_id_is_used_once_even_after_its_request_has_ended():
    engine = make_engine()
    first = submit(engine, prompt_ids(3), max_tokens=2, request_id="1")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="request id '1' has been used already"):
            submit(engine, prompt_ids(5), request_id="1")
        assert engine.requests == [first]
        check(engine)
        run_to_end(engine)
    unnamed = [submit(engine, prompt_ids(5), max_tokens=2) for _ in range(2)]
    assert [r.request_id for r in unnamed] == ["0", "2"]  # 1 is taken
    run_to_end(engine)
    assert list(first.output_token_ids) == tokens_alone(prompt_ids(3), 2)
    assert engine.output(unnamed[0]).outputs[0].token_ids == tokens_alone(prompt_ids(5), 2)


def test_deltas_of_a_stream_join_to_the_output():
    engine = dictated((A, B, C, D), (D, END), (B, B, A))
    requests = [
        submit(engine, [A], max_tokens=4),
        submit(engine, [A], max_tokens=4),
        submit(engine, [B], max_tokens=3, stop=["bbb"]),
    ]
    deltas = list(engine)
    for request in requests:
        own = [d for d in deltas if d.request_id == request.request_id]
        output = engine.output(request).outputs[0]
        assert "".join(d.text for d in own) == output.text
        assert [t for d in own for t in d.token_ids] == output.token_ids
        assert [d.finished for d in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == output.finish_reason
    assert [engine.output(r).outputs[0].text for r in requests] == ["abcd", "d", "bba"]


def test_a_request_that_a_stop_string_ends_has_one_last_delta():
    engine = dictated((A, B, C))
    submit(engine, [A], max_tokens=9, stop=["b"])
    assert [d.finished for d in engine] == [False, True]


def test_an_abort_gives_one_last_delta_even_if_it_never_ran():
    engine = make_engine()
    runs = submit(engine, prompt_ids(3), max_tokens=4, request_id="runs")
    submit(engine, prompt_ids(3), max_tokens=4, request_id="waits")
    engine.abort("waits")
    stream = iter(engine)
    seen = [next(stream) for _ in range(3)]
    engine.abort("runs")
    seen += stream
    finals = [(d.request_id, d.finish_reason) for d in seen if d.finished]
    assert finals == [("waits", "abort"), ("runs", "abort")]
    assert runs.num_output_tokens == 2
    check_idle(engine)


def test_an_abort_of_the_only_request_is_told_although_nothing_is_left_to_do():
    engine = make_engine()
    request = submit(engine, prompt_ids(3))
    assert engine.abort(request.request_id)
    assert engine.has_work
    (delta,) = list(engine)
    assert (delta.finished, delta.finish_reason, delta.token_ids) == (True, "abort", ())
    check_idle(engine)


def states(engine, request):
    """A name for where a request is."""
    if request.state is State.WAITING:
        return "preempted" if request.num_preemptions else "waiting"
    if request.state is State.RUNNING:
        return "decoding" if request.num_output_tokens else "in its prompt"
    held = request in engine.scheduler.batch.finished
    return "finished and held" if held else "released"


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
def test_an_abort_in_every_state_frees_everything_and_adds_no_token(batching):
    limits = make_limits(
        block_size=2,
        num_blocks=6,
        max_num_seqs=3,
        max_model_len=10,
        max_num_batched_tokens=10 if batching.whole_prompts else 4,
    )
    seen = set()
    for when in range(20):
        for who in range(4):
            engine = make_engine(limits, batching=batching)
            requests = [submit(engine, prompt_ids(2 + i, i), max_tokens=5 - i) for i in range(4)]
            for _ in range(when):
                engine.step()
            request = requests[who]
            state, num_output = states(engine, request), request.num_output_tokens
            seen.add(state)
            was_over = request.state is State.FINISHED
            assert engine.abort(request.request_id) is not was_over
            assert engine.abort(request.request_id) is False
            check(engine)
            run_to_end(engine)
            check_idle(engine)
            assert request.num_output_tokens == num_output
            assert request.finish_reason == ("length" if was_over else "abort")
            for i, mate in enumerate(requests):
                if mate is not request:
                    expected = tokens_alone(prompt_ids(2 + i, i), 5 - i)
                    assert list(mate.output_token_ids) == expected
    assert {"waiting", "decoding", "finished and held", "released", "preempted"} <= seen


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
def test_an_abort_while_the_step_runs_drops_its_token(batching):
    engine = make_engine(batching=batching)
    first = submit(engine, prompt_ids(3), max_tokens=4)
    second = submit(engine, prompt_ids(4), max_tokens=4)
    engine.step()
    engine.executor.on_submit = lambda plan: engine.abort(first.request_id)
    assert first not in [r for r in engine.step() if r.finish_reason is None]
    engine.executor.on_submit = lambda plan: None
    assert (first.num_output_tokens, first.finish_reason) == (1, "abort")
    run_to_end(engine)
    check_idle(engine)
    assert list(second.output_token_ids) == tokens_alone(prompt_ids(4), 4)


def test_an_unknown_id_cannot_be_aborted():
    engine = make_engine()
    assert engine.abort("never seen") is False
    assert len(engine.events) == 0


@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_finishing_at_every_place_in_a_block_leaves_nothing_behind(batching, block_size):
    limits = make_limits(block_size=block_size, num_blocks=1 + -(-20 // block_size))
    for length in range(1, 10):
        engine = make_engine(limits, batching=batching)
        requests = [submit(engine, prompt_ids(length, n), max_tokens=n) for n in range(1, 5)]
        run_to_end(engine)
        check_idle(engine)
        for n, request in enumerate(requests, start=1):
            assert list(request.output_token_ids) == tokens_alone(prompt_ids(length, n), n)


def test_an_idle_engine_does_nothing():
    engine = make_engine()
    assert engine.step() == []
    assert (engine.has_work, engine.steps, engine.executor.plans) == (False, [], [])
    assert list(engine) == []
    assert engine.clock.now_s() == 0.0


def test_records_and_events_of_a_run_agree():
    engine = make_engine(make_limits(max_num_seqs=2), batching=Static())
    requests = [submit(engine, prompt_ids(3, n), max_tokens=n) for n in (3, 1, 2)]
    run_to_end(engine)
    assert [s.num_rows for s in engine.steps] == [2, 1, 1, 1, 1]
    assert [s.num_running for s in engine.steps] == [2, 1, 1, 1, 1]
    assert [s.num_held for s in engine.steps] == [0, 1, 1, 0, 0]
    assert [s.num_waiting for s in engine.steps] == [1, 1, 1, 0, 0]
    assert [s.num_tokens for s in engine.steps] == [6, 1, 1, 3, 1]
    assert [s.start_s for s in engine.steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    own = [e for e in engine.events if e.request_id == requests[1].request_id]
    assert [(e.kind, e.num_tokens, e.row) for e in own] == [
        (Kind.ARRIVED, 3, -1),
        (Kind.ENTERED, 3, 1),
        (Kind.CHUNK, 3, 1),
        (Kind.FINISHED, 1, 1),
        (Kind.RELEASED, 4, 1),
    ]
    held_back = [e for e in engine.events if e.kind is Kind.HELD_BACK]
    assert {e.request_id for e in held_back} == {requests[2].request_id}
    assert [e.detail for e in held_back] == ["rows", UNASKED, UNASKED]


def test_a_later_arrival_is_not_served_before_an_earlier_one():
    engine = make_engine(make_limits(max_num_seqs=1))
    late = submit(engine, prompt_ids(3), max_tokens=1, arrival_s=5.0)
    early = submit(engine, prompt_ids(3), max_tokens=1, arrival_s=1.0)
    run_to_end(engine)
    assert early.first_scheduled_s < late.first_scheduled_s


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("batching", policies("batching"), ids=name_of)
def test_a_step_that_fails_ends_every_request_and_the_engine_serves_on(batching, failure):
    engine = make_engine(make_limits(max_num_seqs=2), batching=batching)
    requests = [submit(engine, prompt_ids(3, n), max_tokens=4) for n in range(3)]
    engine.step()

    def fail(plan):
        raise failure

    engine.executor.on_submit = fail
    with pytest.raises(type(failure)):
        engine.step()
    engine.executor.on_submit = lambda plan: None
    assert engine.step() == requests  # their end is told, though nothing is left to do
    check_idle(engine)
    assert [r.finish_reason for r in requests] == ["error"] * 3
    assert all(type(failure).__name__ in r.error for r in requests)
    assert [r.num_output_tokens for r in requests] == [1, 1, 0]
    assert len(engine.steps) == len(engine.ledger.steps()) == 1
    later = submit(engine, prompt_ids(5, 7), max_tokens=4)
    run_to_end(engine)
    check_idle(engine)
    assert list(later.output_token_ids) == tokens_alone(prompt_ids(5, 7), 4)


def test_a_stream_of_one_request_serves_the_others_beside_it():
    engine = dictated((A, B, C), (D, C, B))
    streamed, beside = (submit(engine, [A], max_tokens=3) for _ in range(2))
    deltas = list(engine.stream(streamed))
    assert [(d.text, d.token_ids, d.finished) for d in deltas] == [
        ("a", (A,), False),
        ("b", (B,), False),
        ("c", (C,), True),
    ]
    assert list(beside.output_token_ids) == [D, C, B]


def test_leaving_a_stream_early_aborts_its_request_alone():
    engine = make_engine()
    streamed, beside = (submit(engine, prompt_ids(3, n), max_tokens=6) for n in range(2))
    stream = engine.stream(streamed)
    next(stream)
    stream.close()
    assert (streamed.finish_reason, streamed.num_output_tokens) == ("abort", 1)
    run_to_end(engine)
    check_idle(engine)
    assert list(beside.output_token_ids) == tokens_alone(prompt_ids(3, 1), 6)


def test_a_stop_string_does_not_end_it_before_min_tokens():
    (only,) = serve(B, A, B, C, max_tokens=4, stop=["b"], min_tokens=2)[0].outputs
    assert (only.token_ids, only.text) == ([B, A, B], "ba")
    assert (only.finish_reason, only.stop_reason) == ("stop", "b")


def test_a_stop_string_may_begin_within_min_tokens():
    (only,) = serve(A, B, C, max_tokens=3, stop=["ab"], min_tokens=1)[0].outputs
    assert (only.token_ids, only.text, only.stop_reason) == ([A, B], "", "ab")


def test_a_stop_passed_over_may_be_the_beginning_of_the_next():
    (only,) = serve(A, A, A, max_tokens=4, stop=["aa"], min_tokens=2)[0].outputs
    assert (only.token_ids, only.text, only.stop_reason) == ([A, A, A], "a", "aa")


def test_a_result_of_another_step_is_not_applied():
    engine = make_engine()
    submit(engine, prompt_ids(3), max_tokens=2)
    plan = engine.scheduler.plan(now_s=0.0)
    engine.executor.submit(plan)
    result = engine.executor.collect()._replace(step_id=plan.step_id + 1)
    with pytest.raises(RuntimeError, match="result of step 2 applied to step 1"):
        engine.scheduler.apply(plan, result, now_s=0.0)


@pytest.mark.parametrize("place", ["enter", "hold", "key", "propose"])
def test_a_failure_anywhere_in_planning_loses_no_block_and_no_row(place, monkeypatch):
    """Also between two changes that belong together, and when a policy is what fails."""
    engine = make_engine()
    requests = [submit(engine, prompt_ids(5, n), max_tokens=4) for n in range(3)]
    engine.step()
    later = submit(engine, prompt_ids(6, 9), max_tokens=4)
    scheduler = engine.scheduler
    owner, name = {
        "enter": (scheduler.batch, "enter"),
        "hold": (scheduler.batch.tables, "grow"),
        "key": (scheduler.batch.waiting, "__iter__"),
        "propose": (type(scheduler.policies.batching), "propose"),
    }[place]
    owner = type(owner) if name == "__iter__" else owner

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(engine)
    monkeypatch.undo()
    assert {r.finish_reason for r in [*requests, later]} <= {"error", "length"}
    assert later.finish_reason == "error"
    engine.step()
    check_idle(engine)
    again = submit(engine, prompt_ids(6, 9), max_tokens=4)
    run_to_end(engine)
    check_idle(engine)
    assert list(again.output_token_ids) == tokens_alone(prompt_ids(6, 9), 4)


def test_a_stream_that_was_never_read_aborts_its_request():
    engine = make_engine()
    request = submit(engine, prompt_ids(3), max_tokens=6)
    stream = engine.stream(request)
    del stream
    engine.step()  # what is let go of ends when a step begins
    assert request.finish_reason == "abort"
    assert not engine.has_work


def test_a_stream_collected_while_rows_are_released_ends_with_the_next_step():
    """Garbage is collected wherever Python likes, also in the middle of a change."""
    engine = make_engine()
    ends, streamed = submit(engine, prompt_ids(3), max_tokens=1), submit(engine, prompt_ids(4))
    streams, let_go_of = [engine.stream(streamed)], engine.scheduler.batch._let_go_of

    def collecting(sequence):
        streams.clear()
        let_go_of(sequence)

    engine.scheduler.batch._let_go_of = collecting
    run_to_end(engine)
    assert (ends.finish_reason, streamed.finish_reason) == ("length", "abort")
    check_idle(engine)


def test_an_id_that_a_policy_refused_may_be_used_again():
    engine = make_engine(reservation=Oracle())
    with pytest.raises(InvalidRequest, match="true output lengths"):
        submit(engine, prompt_ids(3), request_id="a", origin=Origin())
    assert submit(engine, prompt_ids(3), request_id="a", max_tokens=2).request_id == "a"
    run_to_end(engine)


class Meddling:
    """A gate that lets everyone in, and does something when it sees a kind of event."""

    def __init__(self, kind, act):
        self.kind, self.act = kind, act

    def init(self):
        return None

    def observe(self, state, seen):
        if seen.kind is self.kind:
            self.act()

    def refusal(self, state, request, memory):
        return None


@pytest.mark.parametrize("kind", [Kind.ENTERED, Kind.SERVED])
def test_nobody_is_aborted_while_a_step_is_decided_or_its_tokens_are_dealt_out(kind):
    gate = Meddling(kind, lambda: engine.abort("0"))
    engine = make_engine(gates=(gate,))
    request = submit(engine, prompt_ids(3), max_tokens=3)
    with pytest.raises(RuntimeError, match="request 0 cannot be aborted while a step is decided"):
        engine.step()
    assert request.finish_reason == "error"
    gate.kind = None
    later = submit(engine, prompt_ids(3), max_tokens=3)
    engine.step()
    assert engine.abort(later.request_id)
    run_to_end(engine)
    check_idle(engine)


@pytest.mark.parametrize("kind", [Kind.ENTERED, Kind.SERVED])
def test_a_stream_that_is_collected_while_a_step_is_decided_aborts_before_the_next(kind):
    streams = []
    gate = Meddling(kind, streams.clear)
    engine = make_engine(gates=(gate,))
    streamed, beside = (submit(engine, prompt_ids(3, n), max_tokens=4) for n in range(2))
    streams.append(engine.stream(streamed))
    assert engine.step() == [streamed, beside]
    assert streams == []
    assert (streamed.finish_reason, streamed.num_output_tokens) == (None, 1)
    assert engine.step() == [beside]
    assert (streamed.finish_reason, streamed.num_output_tokens) == ("abort", 1)
    run_to_end(engine)
    check_idle(engine)
    assert list(beside.output_token_ids) == tokens_alone(prompt_ids(3, 1), 4)
