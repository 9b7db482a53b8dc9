"""Worked examples of each gate, and several of them in turn."""

from itertools import product

import pytest
from builders import make_engine, make_limits, make_request, prompt_ids, submit
from hypothesis import given, settings
from hypothesis import strategies as st

from paxserve.admission import Seen
from paxserve.events import Kind
from paxserve.gate import MemoryView
from paxserve.gate.past_future import PastFuture, peak_blocks
from paxserve.gate.reserve_full_prompt import ReserveFullPrompt
from paxserve.gate.token_ratio import TokenRatio
from paxserve.gate.watermark import Watermark
from paxserve.gates import Gates
from paxserve.request import FinishReason, Origin


def make(num_prompt=4, num_output=0, *, max_tokens=12, request_id=None):
    """A request in the middle of its output."""
    request = make_request(num_prompt, max_tokens=max_tokens, request_id=request_id)
    request.sequence.token_ids.extend([1] * num_output)
    request.sequence.num_remaining_tokens += num_output
    return request


def finished(num_output, reason=FinishReason.LENGTH):
    request = make(num_output=num_output, max_tokens=20)
    request.finish_reason = reason
    return Seen(Kind.FINISHED, 0.0, request)


RUNNING = (make(),)


def test_the_watermark_is_a_share_of_the_pool_rounded_down():
    def free_at_least(share, num_usable):
        frees = range(num_usable + 1)
        views = [MemoryView(num_usable, free, 3, running=RUNNING) for free in frees]
        return [Watermark(share).refusal(None, make(), view) is None for view in views].index(True)

    assert free_at_least(0.01, 99) == 3
    assert free_at_least(0.01, 100) == 4
    assert free_at_least(0.1, 59) == 8
    assert free_at_least(0.0, 10) == 3
    assert Watermark(0.5).refusal(None, make(), MemoryView(10, 3, 3)) is None  # nothing else runs


def test_a_prompt_enters_only_when_all_of_it_finds_blocks():
    gate = ReserveFullPrompt()
    view = MemoryView(num_usable=20, num_free=7, num_needed=2, num_needed_for_all=8)
    assert gate.refusal(None, make(), view) is None
    refusal = gate.refusal(None, make(), view._replace(running=RUNNING))
    assert refusal == "reserve_full_prompt: its known tokens take 8 blocks, 7 are free"
    assert gate.refusal(None, make(), view._replace(running=RUNNING, num_free=8)) is None


# Past-Future.


def peak_by_steps(futures):
    """Let everybody produce a token a step, and look."""
    most, left = 0, list(futures)
    while left:
        most = max(most, sum(known for known, _ in left))
        left = [(known + 1, remaining - 1) for known, remaining in left if remaining > 0]
    return most


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_the_peak_is_the_most_that_stepping_ever_shows(futures):
    assert peak_blocks(futures, 1) == peak_by_steps(futures)


def test_the_peak_counts_blocks_whole():
    assert peak_blocks([(3, 2)], 4) == 2
    assert peak_blocks([(3, 2), (4, 4)], 4) == 4  # when the first ends: 5 and 6 tokens


def test_lengths_are_those_that_finished_lately_and_by_themselves():
    gate = PastFuture(window=3)
    state = gate.init()
    for num_output in (9, 2, 7, 2, 5):
        state = gate.observe(state, finished(num_output))
    state = gate.observe(state, finished(1, FinishReason.ABORT))
    assert state == ([7, 2, 5], [2, 5, 7])


def test_a_draw_is_among_the_longer_ones_and_ends_at_the_limit():
    gate = PastFuture()
    state = gate.init()
    for num_output in (2, 4, 6):
        state = gate.observe(state, finished(num_output))

    def fits(num_usable, request, running):
        view = MemoryView(num_usable, 0, 1, running=(running,))
        return gate.refusal(state, request, view) is None

    newcomers = [make(4, request_id=f"n{i}") for i in range(60)]
    done = make(4, 12)  # at its limit: holds 16, and nothing is to come
    totals = [next(n for n in range(99) if fits(n, request, done)) for request in newcomers]
    # 16 + 4 at first, or alone at the end 4 + length: the draws themselves show beside one running.
    assert set(totals) == {20}
    going = make(4, 6)  # nobody was longer: it goes on to 12, that is 6 more
    totals = [next(n for n in range(99) if fits(n, request, going)) for request in newcomers]
    # Together until the newcomer ends after 2, 4 or 6 tokens: 14 + 2 * length.
    assert {total: totals.count(total) > 9 for total in totals} == {18: True, 22: True, 26: True}
    short = [make(4, max_tokens=3, request_id=f"s{i}") for i in range(30)]
    totals = {next(n for n in range(99) if fits(n, request, going)) for request in short}
    assert totals == {18, 20}  # 2, or cut at 3


def test_past_future_prevents_preemptions_that_admitting_freely_causes():
    def num_preemptions(*gates):
        limits = make_limits(num_blocks=17, max_num_seqs=8)
        engine = make_engine(limits, gates=gates)
        for salt in range(20):
            submit(engine, prompt_ids(4, salt), max_tokens=20)
        while engine.has_work:
            engine.step()
        return sum(request.num_preemptions for request in engine.requests)

    assert num_preemptions() > 5
    assert num_preemptions(PastFuture()) == 0


# Token ratio.


def test_the_ratio_falls_once_a_step_to_its_minimum_and_jumps_back_when_someone_is_preempted():
    gate = TokenRatio(initial=0.7, minimum=0.1, decay_steps=6)
    state, values = gate.init(), []
    for time_s, _ in product(range(8), range(3)):  # three are served in each step
        state = gate.observe(state, Seen(Kind.SERVED, float(time_s), make()))
        values.append(round(state.value, 6))
    assert values[::3] == values[2::3] == [0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1]
    state = gate.observe(state, Seen(Kind.PREEMPTED, 7.0, make()))
    assert state.value == 0.7
    assert gate.observe(state, Seen(Kind.ARRIVED, 8.0, make())) == state


def test_a_share_of_what_is_still_to_come_is_kept_free():
    gate = TokenRatio(initial=0.5, minimum=0.0, clip_tokens=8)
    running = (make(4, 2, max_tokens=12), make(4, 8, max_tokens=12))  # 8 (of 10) and 4 to come
    newcomer = make(4, max_tokens=5)  # two blocks of two for its prompt, and five
    view = MemoryView(40, 0, 1, num_needed_for_all=2, block_size=2, running=running)
    admits = [
        gate.refusal(gate.init(), newcomer, view._replace(num_free=free)) is None
        for free in range(10)
    ]
    assert admits.index(True) == 8  # 4 + 5 + (8 + 4) / 2 = 15 slots
    refusal = gate.refusal(gate.init(), newcomer, view._replace(num_free=7))
    assert refusal == (
        "token_ratio: 9 tokens, and 6 for those that run at a ratio of 0.500, exceed 14 free slots"
    )


def test_who_entered_in_this_step_counts_in_full():
    gate = TokenRatio(initial=0.5, minimum=0.0)
    running = (make(max_tokens=8), make(max_tokens=4))
    view = MemoryView(40, 0, 1, block_size=4, running=running, newcomers=frozenset(running[:1]))
    refusal = gate.refusal(gate.init(), make(max_tokens=5), view)
    assert refusal.startswith("token_ratio: 9 tokens, and 10 for those")  # 8 + 4 / 2


def test_gates_do_not_see_forced_lengths():
    """Prompts of 4 that are forced to end after 5 tokens; a server would expect up to 28."""
    forced = [
        make_request(4, max_tokens=5, origin=Origin(num_true_output_tokens=5)) for _ in range(2)
    ]
    view = MemoryView(63, 0, 4, block_size=1, running=(forced[0],))
    ratio, past = TokenRatio(initial=1.0, minimum=0.0), PastFuture()
    refusal = ratio.refusal(ratio.init(), forced[1], view)
    assert refusal.startswith("token_ratio: 32 tokens, and 28 for those")
    refusal = past.refusal(past.init(), forced[1], view)
    assert refusal.startswith("past_future: 2 requests would come to hold 64 blocks")


def test_a_minimum_above_the_start_is_refused():
    with pytest.raises(ValueError, match=r"minimum=0.5 must not exceed initial=0.2"):
        TokenRatio(initial=0.2, minimum=0.5)


# Several.


def test_gates_are_asked_in_turn_and_each_learns_by_itself():
    gates = Gates([ReserveFullPrompt(), TokenRatio(initial=1.0, minimum=0.0), PastFuture(window=1)])
    assert gates.learns
    assert not Gates([Watermark()]).learns
    view = MemoryView(40, 20, 1, num_needed_for_all=1, block_size=1, running=RUNNING)
    request = make(4, max_tokens=8)
    assert gates.refusal(request, view._replace(num_needed_for_all=21)).startswith("reserve_full")
    assert gates.refusal(request, view).startswith("token_ratio: 9 tokens, and 12")
    for time_s in range(600):
        gates.tell(Seen(Kind.SERVED, float(time_s), RUNNING[0]))
    assert gates.refusal(request, view) is None
    assert gates.refusal(request, view._replace(num_usable=10)).startswith("past_future: 2 req")
    gates.tell(finished(1))
    assert gates.refusal(request, view._replace(num_usable=10)) is None
    gates.clear()
    assert gates.refusal(request, view).startswith("token_ratio")
