"""Worked examples of each order."""

import math
import statistics
from itertools import combinations

import pytest
from builders import (
    greedy,
    make_engine,
    make_intake,
    make_limits,
    make_request,
    prompt_ids,
    submit,
)

from paxserve.admission import Seen
from paxserve.admission.aging import Aging
from paxserve.admission.fcfs import Fcfs
from paxserve.admission.longest_prefix_hit import LongestPrefixHit
from paxserve.admission.mlfq import Mlfq
from paxserve.admission.priority import Priority
from paxserve.admission.shortest_prompt import ShortestPrompt
from paxserve.admission.sjf import Sjf
from paxserve.admission.srpt import Srpt
from paxserve.admission.vtc import Vtc
from paxserve.events import Kind
from paxserve.prediction import draw, expected_output_tokens
from paxserve.request import Origin
from paxserve.waiting import WaitingQueue


def make(*, tokens=2, intake=None, arrival_s=0.0, max_tokens=16, **origin):
    return make_request(
        tokens,
        intake=intake,
        arrival_s=arrival_s,
        max_tokens=max_tokens,
        origin=Origin(**origin),
    )


def queue_of(order, requests):
    queue = WaitingQueue(order)
    for request in requests:
        queue.tell(Seen(Kind.ARRIVED, request.arrival_s, request))
        queue.push(request)
    return queue


def enter(queue, request, time_s=0.0):
    queue.remove(request)
    queue.tell(Seen(Kind.ENTERED, time_s, request))


def serve(queue, request, time_s=0.0, *, num_outputs=1, duration_s=1.0):
    queue.tell(Seen(Kind.SERVED, time_s, request, num_outputs, num_outputs, duration_s))


def put_back(queue, request, time_s):
    queue.tell(Seen(Kind.PREEMPTED, time_s, request))
    queue.push(request)


# Orders that depend on the request alone.


def test_the_more_urgent_goes_first_and_equals_by_arrival():
    intake = make_intake()
    priorities = [1, 0, 1, -2]
    a, b, c, d = [make(priority=p, intake=intake) for p in priorities]
    assert list(queue_of(Priority(), [a, b, c, d])) == [d, b, a, c]
    assert Priority(displaces_running=True).displaces_running


def test_the_shortest_prompt_goes_first():
    intake = make_intake()
    a, b, c = [make(tokens=n, intake=intake) for n in (4, 2, 9)]
    assert list(queue_of(ShortestPrompt(), [a, b, c])) == [b, a, c]


def test_the_shortest_output_goes_first_by_what_is_known():
    intake = make_intake()
    a = make(num_true_output_tokens=9, num_predicted_output_tokens=1, intake=intake)
    b = make(num_true_output_tokens=3, num_predicted_output_tokens=5, intake=intake)
    unknown = make(max_tokens=7, intake=intake)
    assert list(queue_of(Sjf(), [a, b, unknown])) == [b, unknown, a]
    assert list(queue_of(Sjf(length="predicted"), [a, b, unknown])) == [a, b, unknown]
    assert list(queue_of(Sjf(default_tokens=2), [a, b, unknown])) == [unknown, b, a]


def test_an_order_by_declared_lengths_does_not_see_forced_ones():
    """A prompt of 4 in a model of 32: 28 may come, though 2 will."""
    request = make_request(4, max_tokens=2, origin=Origin(num_true_output_tokens=2))
    ranks = [order.key(None, request) for order in (Sjf(length="predicted"), Sjf())]
    assert ranks == [(28,), (2,)]


def test_what_remains_counts_in_srpt_and_what_was_produced_stays_produced():
    intake = make_intake()
    long, short = [make(num_true_output_tokens=n, intake=intake) for n in (9, 6)]
    queue = queue_of(Srpt(), [long, short])
    assert list(queue) == [short, long]
    queue.remove(long)
    long.sequence.token_ids.extend([1] * 4)
    assert (queue.rank(long), queue.rank(short)) == ((5,), (6,))  # it may displace the other
    queue.push(long)
    assert list(queue) == [long, short]
    long.sequence.token_ids.extend([1] * 9)
    assert queue.rank(long) == (1,)


def test_a_predictor_errs_by_a_log_normal_factor_fixed_by_the_id():
    requests = [
        make_request(2, request_id=f"r{i}", origin=Origin(num_true_output_tokens=100))
        for i in range(2000)
    ]

    def errors(sigma):
        expected = [
            expected_output_tokens(r, length="oracle", error=sigma, default_tokens=None)
            for r in requests
        ]
        return [math.log(tokens / 100) for tokens in expected]

    assert errors(0.5) == errors(0.5)
    assert set(errors(0)) == {0.0}
    assert statistics.mean(errors(0.5)) == pytest.approx(0, abs=0.05)
    assert statistics.stdev(errors(0.5)) == pytest.approx(0.5, rel=0.05)
    assert errors(1.0) == pytest.approx([2 * e for e in errors(0.5)])
    assert draw("r0") == pytest.approx(0.863664, abs=1e-6)  # on every machine, in every process


# Skip-join multi-level feedback queue.

MLFQ = Mlfq(first_quantum_s=1.0, num_levels=4, prefill_s_per_token=1.0, starvation_s=10.0)


@pytest.mark.parametrize(("tokens", "level"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (29, 3)])
def test_a_newcomer_joins_the_highest_level_whose_quantum_covers_its_prompt(tokens, level):
    request = make(tokens=tokens, arrival_s=2.0)
    assert MLFQ.key(MLFQ.init(), request) == (level, 2.0)


def test_a_request_sinks_when_its_served_time_exceeds_the_quantum_and_not_before():
    request = make(tokens=1)
    queue = queue_of(MLFQ, [request])
    enter(queue, request, 0.0)
    assert queue.rank(request) == (-1, 0.0)  # not displaced before its first token
    levels = []
    for second in range(1, 12):
        serve(queue, request, float(second))
        levels.append(queue.rank(request))
    # More than 1 s in level 0, 2 s in level 1, 4 s in level 2, and level 3 has no end.
    expected = [(0, 0.0)] + 3 * [(1, 2.0)] + 5 * [(2, 5.0)] + 2 * [(3, 10.0)]
    assert levels == expected


def test_a_chunk_without_a_token_is_served_time_but_does_not_expose_it():
    request = make(tokens=1)
    queue = queue_of(MLFQ, [request])
    enter(queue, request)
    serve(queue, request, 1.5, num_outputs=0, duration_s=1.5)
    assert queue.rank(request) == (-1, 1.5)
    serve(queue, request, 2.0, duration_s=0.5)
    assert queue.rank(request) == (1, 1.5)


def test_who_was_displaced_waits_behind_those_of_its_level_and_starves_from_then_on():
    intake = make_intake()
    first, second, new = [make(tokens=n, intake=intake) for n in (2, 2, 1)]
    queue = queue_of(MLFQ, [first, second])
    enter(queue, first)
    serve(queue, first, 1.0)
    queue.push(new)
    assert queue.rank(new) < queue.rank(first)  # so it may displace it
    put_back(queue, first, 1.0)
    assert list(queue) == [new, second, first]
    assert queue.next_timer_s() == 10.0
    queue.tell(Seen(Kind.TIMER, 10.0))
    assert list(queue) == [second, new, first]  # two of level 0, of one time, by submission
    assert (queue.rank(second), queue.rank(first)) == ((0, 0.0), (1, 1.0))
    assert queue.next_timer_s() == 11.0


def test_who_starves_moves_to_level_0_with_a_whole_quantum_of_that_level():
    request = make(tokens=3)
    queue = queue_of(MLFQ, [request])
    enter(queue, request)
    serve(queue, request, 3.0, duration_s=3.0)
    put_back(queue, request, 3.0)
    queue.tell(Seen(Kind.TIMER, 12.9))
    assert queue.rank(request) == (2, 3.0)
    queue.tell(Seen(Kind.TIMER, 13.0))
    assert queue.rank(request) == (0, 3.0)
    enter(queue, request, 13.0)
    serve(queue, request, 14.0)
    assert queue.rank(request) == (0, 3.0)
    serve(queue, request, 15.0)
    assert queue.rank(request) == (1, 15.0)
    queue.tell(Seen(Kind.TIMER, 60.0))  # it runs: who runs does not starve
    assert queue.rank(request) == (1, 15.0)
    queue.tell(Seen(Kind.FINISHED, 60.0, request))
    assert queue._state.by_id == {}


# Virtual token counters.


def clients(names, *, tokens=4, intake=None):
    intake = intake or make_intake()
    return [make(tokens=tokens, client=name, intake=intake) for name in names]


def test_counters_charge_input_once_and_every_output():
    a, b = clients("ab")
    queue = queue_of(Vtc(w_input=1.0, w_output=2.0), [a, b])
    enter(queue, a)
    assert (queue.rank(a)[0], queue.rank(b)[0]) == (4.0, 0.0)
    serve(queue, a, num_outputs=3)
    assert queue.rank(a)[0] == 10.0
    put_back(queue, a, 0.0)
    assert list(queue) == [b, a]
    enter(queue, a)
    assert queue.rank(a)[0] == 10.0
    serve(queue, a, num_outputs=1)
    assert queue.rank(a)[0] == 12.0


def test_a_weight_divides_what_is_charged():
    a, b = clients("ab")
    queue = queue_of(Vtc(client_weights={"a": 4.0}), [a, b])
    for request in (a, b):
        enter(queue, request)
        serve(queue, request)
    assert (queue.rank(a)[0], queue.rank(b)[0]) == (1.5, 6.0)


def test_who_comes_back_is_lifted_to_the_least_served_that_waits():
    a, b, b2, c, c2 = clients("abbcc")
    queue = queue_of(Vtc(), [a, b])
    enter(queue, a)
    serve(queue, a, num_outputs=10)
    enter(queue, b)  # a has 24, b has 4 and was the last to have nobody waiting
    queue.tell(Seen(Kind.ARRIVED, 0.0, c))
    queue.push(c)
    assert queue.rank(c)[0] == 4.0  # nobody waits: the counter of the last to leave
    serve(queue, b, num_outputs=3)
    queue.tell(Seen(Kind.ARRIVED, 0.0, b2))
    queue.push(b2)
    assert queue.rank(b)[0] == 10.0  # has more than the lift to 4
    enter(queue, c)  # c has 8 and nobody waiting any more
    queue.tell(Seen(Kind.ARRIVED, 0.0, c2))
    queue.push(c2)
    assert queue.rank(c2)[0] == 10.0  # only b waits


def test_an_aborted_request_leaves_no_trace_but_its_counter():
    a, b = clients("ab")
    queue = queue_of(Vtc(), [a, b])
    enter(queue, a)
    queue.remove(b)
    for request in (a, b):
        queue.tell(Seen(Kind.FINISHED, 0.0, request))
    state = queue._state
    assert (state.num_waiting, state.waits, state.charged) == ({}, {}, set())
    assert state.counters == {"a": 4.0, "b": 0.0}


def service_gaps(order):
    """W_a - W_b after every step of a run in which client a floods first, and both always wait."""
    limits = make_limits(max_num_seqs=3, max_num_batched_tokens=16, num_blocks=60)
    engine = make_engine(limits, admission=order)
    shapes = {"a": (7, 5), "b": (3, 9)}
    for client, num in (("a", 80), ("b", 80)):
        num_prompt, num_output = shapes[client]
        for salt in range(num):
            origin = Origin(client=client)
            submit(engine, prompt_ids(num_prompt, salt), max_tokens=num_output, origin=origin)
    gaps = []
    while {r.origin.client for r in engine.scheduler.batch.waiting} == {"a", "b"}:
        engine.step()
        service = {"a": 0.0, "b": 0.0}
        for request in engine.requests:
            if request.first_scheduled_s is not None:
                charged = request.num_prompt_tokens + 2 * request.num_output_tokens
                service[request.origin.client] += charged
        gaps.append(service["a"] - service["b"])
    return gaps


def test_service_of_two_clients_that_wait_never_differs_by_more_than_the_bound():
    bound = 2 * max(1 * 7, 2 * 36)  # 2 max(w_input L, w_output M): three rows of 12 tokens
    gaps = service_gaps(Vtc())
    assert len(gaps) > 100
    assert max(abs(x - y) for x, y in combinations(gaps, 2)) <= bound
    assert max(service_gaps(Fcfs())) > 5 * bound


# Longest prefix hit.


def with_prompt(token_ids, intake, **origin):
    return intake.make(
        {"prompt_token_ids": token_ids}, greedy(), arrival_s=0.0, origin=Origin(**origin)
    )


def test_most_cached_tokens_go_first_and_equals_by_arrival():
    intake = make_intake()
    requests = [with_prompt(prompt_ids(9, salt), intake) for salt in range(4)]
    cached = dict(zip(requests, (0, 4, 8, 4), strict=True))
    a, b, c, d = requests
    assert LongestPrefixHit().reorder(requests, cached.__getitem__) == [c, b, d, a]


def test_who_shares_too_much_uncached_with_one_ahead_is_left_out():
    intake, common = make_intake(), prompt_ids(6)
    a, b = [with_prompt([*common, i], intake) for i in (1, 2)]
    other = with_prompt([*common[:5], 7, 7], intake)
    salted = with_prompt([*common, 1], intake, cache_salt="s")
    requests = [a, b, other, salted]
    order = LongestPrefixHit(shared_tokens=5)
    assert order.reorder(requests, lambda r: 0) == [a, other, salted]
    # With one token cached, five of the six that b shares are not: that is not too much.
    assert order.reorder(requests, lambda r: 1) == requests
    assert order.reorder([b, other], lambda r: 0) == [b, other]
    assert LongestPrefixHit(shared_tokens=4).reorder(requests, lambda r: 0) == [a, salted]


# Aging.


def test_waiting_makes_up_for_a_gap_exactly_when_rate_times_time_exceeds_it():
    intake = make_intake()
    old = make(num_true_output_tokens=10, intake=intake)
    aging = Aging(inner="sjf", rate=2.0)
    for arrival_s, is_overtaken in ((2.0, True), (2.5, False), (3.0, False)):
        new = make(num_true_output_tokens=5, arrival_s=arrival_s, intake=intake)
        assert (list(queue_of(aging, [old, new])) == [new, old]) is is_overtaken
    assert list(queue_of(Aging(inner="sjf", rate=0.0), [old, new])) == [new, old]


def test_aging_around_an_order_that_learns_ages_its_queues():
    intake = make_intake()
    a = make(client="a", intake=intake)
    late_a, late_b = [make(client=c, arrival_s=3.0, intake=intake) for c in "ab"]
    queue = queue_of(Aging(inner="vtc", rate=1.0, inner_settings={"w_input": 2.0}), [a])
    enter(queue, a)  # a has 4
    for request in (late_a, late_b):
        queue.tell(Seen(Kind.ARRIVED, 3.0, request))
        queue.push(request)
    assert (queue.rank(late_a), queue.rank(late_b)) == ((7.0, 3.0), (7.0, 3.0))
    put_back(queue, a, 3.0)
    assert queue.rank(a) == (4.0, 0.0)
    assert list(queue) == [a, late_a, late_b]


def test_aging_displaces_as_its_inner_order_does():
    assert Aging(inner="mlfq", rate=1.0).displaces_running
    assert not Aging(inner="fcfs", rate=1.0).displaces_running


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner": "longest_prefix_hit"}, "cannot wrap longest_prefix_hit"),
        ({"inner": "nothing"}, "admission=nothing is not known"),
        ({"inner": "os:path"}, "inner must be the name"),
        ({"inner_settings": {"error": -1.0}}, "error must be"),
        ({"inner_settings": {"speed": 1}}, "does not read speed"),
    ],
)
def test_aging_refuses_what_it_cannot_wrap(settings, message):
    with pytest.raises(ValueError, match=message):
        Aging(**{"inner": "sjf", "rate": 1.0, **settings})


def test_weights_of_clients_are_checked():
    with pytest.raises(ValueError, match=r"client_weights\['a'\] must be a number above 0"):
        Vtc(client_weights={"a": 0})


def test_a_length_is_known_from_the_trace_or_predicted():
    with pytest.raises(ValueError, match="length must be oracle or predicted, got True"):
        Sjf(length=True)
