from dataclasses import dataclass

import pytest
from builders import make_intake, make_request

from paxserve.admission.fcfs import Fcfs
from paxserve.events import Event, Kind
from paxserve.waiting import WaitingQueue


@dataclass(frozen=True)
class ShortestFirst:
    """Shortest prompt first; after an event that names a request, that one before all others."""

    stateless: bool = False

    def init(self):
        return frozenset()

    def observe(self, state, event):
        return state | {event.request_id}

    def key(self, state, request):
        return (request.request_id not in state, request.num_prompt_tokens)


def requests(*lengths, arrivals=None):
    intake = make_intake()
    made = [make_request(length, intake=intake) for length in lengths]
    for request, arrival_s in zip(made, arrivals or [0.0] * len(made), strict=True):
        request.arrival_s = arrival_s
    return made


def test_order_is_by_key_then_by_arrival():
    a, b, c = requests(1, 1, 1, arrivals=[2.0, 1.0, 1.0])
    queue = WaitingQueue(Fcfs())
    for request in (c, a, b):
        queue.push(request)
    assert list(queue) == [b, c, a]
    assert len(queue) == 3


def test_a_request_that_comes_back_stands_where_it_stood():
    a, b, c = requests(1, 1, 1, arrivals=[0.0, 1.0, 2.0])
    queue = WaitingQueue(Fcfs())
    queue.push(b)
    queue.push(c)
    queue.push(a)
    assert list(queue) == [a, b, c]


def test_removing_what_does_not_wait_is_an_error_and_changes_nothing():
    a, b = requests(1, 1)
    queue = WaitingQueue(Fcfs())
    queue.push(a)
    with pytest.raises(RuntimeError, match=f"request {b.request_id} is not waiting"):
        queue.remove(b)
    queue.remove(a)
    with pytest.raises(RuntimeError, match="is not waiting"):
        queue.remove(a)
    assert list(queue) == []


def test_the_queue_may_change_while_it_is_walked():
    first, second, third, late = requests(1, 1, 1, 1, arrivals=[1.0, 2.0, 3.0, 0.0])
    queue = WaitingQueue(Fcfs())
    for request in (first, second, third):
        queue.push(request)
    walked = []
    for request in queue:
        walked.append(request)
        queue.remove(request)
        if request is first:
            queue.push(late)  # goes to the front, and is not walked into
    assert walked == [first, second, third]
    assert list(queue) == [late]


def test_events_change_the_order_of_a_policy_with_state():
    long, short, middle = requests(9, 2, 5)
    queue = WaitingQueue(ShortestFirst())
    for request in (long, short, middle):
        queue.push(request)
    assert list(queue) == [short, middle, long]
    queue.observe([Event(1, 0.0, Kind.PREEMPTED, long.request_id)])
    assert list(queue) == [long, short, middle]
    queue.remove(long)
    queue.push(long)
    assert list(queue) == [long, short, middle]
    queue.observe([])
    assert list(queue) == [long, short, middle]
