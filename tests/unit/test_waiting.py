"""The waiting queue against a sorted list, under every order, while anything happens."""

import copy
import gc
import itertools
import statistics
import time
from collections import Counter
from itertools import islice

import pytest
from axes import policies
from builders import make_intake, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paxserve import sorted_entries
from paxserve.admission import Learning, Seen
from paxserve.admission.aging import Aging
from paxserve.admission.fcfs import Fcfs
from paxserve.admission.longest_prefix_hit import LongestPrefixHit
from paxserve.admission.mlfq import Mlfq
from paxserve.admission.sjf import Sjf
from paxserve.admission.vtc import Vtc
from paxserve.events import Kind
from paxserve.request import Origin
from paxserve.waiting import WaitingQueue

# Whole numbers of seconds and tokens, so that sums are exact and ties happen.
MLFQ = Mlfq(first_quantum_s=1.0, num_levels=3, prefill_s_per_token=1.0, starvation_s=4.0)
ORDERS = {
    **{type(order).__name__: order for order in policies("admission")},
    "Mlfq in whole seconds": MLFQ,
    "Vtc with weights": Vtc(client_weights={"a": 2.0}),
    "Sjf with errors": Sjf(error=1.0),
    "Aging of Vtc": Aging(inner="vtc", rate=2.0),
}
COVERED: Counter[str] = Counter()
SHAPES = st.tuples(  # prompt tokens, client, priority, output tokens
    st.integers(1, 9), st.sampled_from("abc"), st.integers(0, 2), st.none() | st.integers(1, 6)
)


def requests(*lengths, arrivals=None):
    intake = make_intake()
    arrivals = arrivals or [0.0] * len(lengths)
    return [
        make_request(length, intake=intake, arrival_s=arrival_s)
        for length, arrival_s in zip(lengths, arrivals, strict=True)
    ]


def queue_of(order, waiting):
    queue = WaitingQueue(order)
    for request in waiting:
        queue.tell(Seen(Kind.ARRIVED, request.arrival_s, request))
        queue.push(request)
    return queue


class QueueMachine(RuleBasedStateMachine):
    """The model: a list of who waits, sorted by the keys of its own fold of what was seen."""

    order = None

    def __init__(self):
        super().__init__()
        self.queue = WaitingQueue(self.order)
        self.learns = isinstance(self.order, Learning)
        self.state = self.order.init() if self.learns else None
        self.waiting, self.running = [], []
        self.intake, self.now_s = make_intake(), 0.0

    def tell(self, kind, request=None, **numbers):
        seen = Seen(kind, self.now_s, request, **numbers)
        self.queue.tell(seen)
        if self.learns:
            self.state = self.order.observe(self.state, seen)

    def ranked(self, waiting):
        return sorted(waiting, key=lambda r: (*self.order.key(self.state, r), r.arrival_seq))

    def take(self, request):
        self.queue.remove(request)
        self.waiting.remove(request)

    @initialize(shapes=st.lists(SHAPES, min_size=6, max_size=9))
    def arrive_at_once(self, shapes):
        for shape in shapes:
            self.arrive(shape)

    @rule(shape=SHAPES)
    def arrive(self, shape):
        length, client, priority, outputs = shape
        origin = Origin(client=client, priority=priority, num_true_output_tokens=outputs)
        request = make_request(
            length, intake=self.intake, arrival_s=self.now_s, origin=origin, max_tokens=16
        )
        self.tell(Kind.ARRIVED, request)
        self.queue.push(request)
        self.waiting.append(request)

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds):
        self.now_s += seconds
        timer_s = self.queue.next_timer_s()
        if timer_s is not None and timer_s <= self.now_s:
            self.tell(Kind.TIMER)
            COVERED["timer"] += 1
            next_s = self.queue.next_timer_s()
            assert next_s is None or next_s > self.now_s

    @precondition(lambda self: self.waiting)
    @rule(num_skipped=st.integers(0, 3), num_taken=st.integers(1, 3), data=st.data())
    def enter_some(self, num_skipped, num_taken, data):
        """A walk that takes some out: at each point the best of those not met yet comes next."""
        met = set()
        for request in self.queue:
            assert request is self.ranked(set(self.waiting) - met)[0]
            met.add(request)
            if len(met) <= num_skipped:
                continue
            self.take(request)
            self.tell(Kind.ENTERED, request)
            self.running.append(request)
            if len(met) == num_skipped + num_taken:
                return  # the walk is left in the middle
            if data.draw(st.booleans()):  # others look while it goes on
                assert self.queue.head() is next(iter(self.queue), None)
            ahead = [other for other in self.waiting if other not in met]
            if ahead and data.draw(st.booleans()):  # and one that is ahead of it goes
                aborted = data.draw(st.sampled_from(ahead))
                self.take(aborted)
                self.tell(Kind.FINISHED, aborted)
                COVERED["aborted ahead of a walk"] += 1
        COVERED["walked to the end"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outputs=st.integers(0, 1), duration_s=st.integers(1, 3))
    def serve(self, data, outputs, duration_s):
        self.now_s += duration_s
        for request in data.draw(st.lists(st.sampled_from(self.running), unique=True)):
            request.sequence.token_ids.extend([1] * outputs)
            self.tell(
                Kind.SERVED, request, num_tokens=1, num_outputs=outputs, duration_s=duration_s
            )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        request.num_preemptions += 1
        self.tell(Kind.PREEMPTED, request)
        self.queue.push(request)
        self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.tell(Kind.FINISHED, request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.waiting))
        self.take(request)
        self.tell(Kind.FINISHED, request)

    @rule(length=st.integers(0, 3))
    def look_and_leave(self, length):
        walk = iter(self.queue)
        assert list(islice(walk, length)) == self.ranked(self.waiting)[:length]

    @invariant()
    def the_queue_is_the_sorted_list(self):
        before = copy.deepcopy(self.queue._state)
        ranked = self.ranked(self.waiting)
        assert list(self.queue) == ranked
        assert self.queue.head() is (ranked[0] if ranked else None)
        assert len(self.queue) == len(self.waiting)
        assert self.queue._state == self.state == before
        for request in (*self.waiting, *self.running):
            assert self.queue.rank(request) == self.order.key(self.state, request)
        COVERED["deep"] += len(ranked) > 6
        COVERED["preempted"] += any(request.num_preemptions for request in self.waiting)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_queue_is_a_sorted_list_whatever_happens(order, monkeypatch):
    monkeypatch.setattr(sorted_entries, "FRONT", 2)
    COVERED.clear()
    run_state_machine_as_test(
        type("Machine", (QueueMachine,), {"order": order}),
        settings=settings(
            max_examples=80,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what in ("walked to the end", "aborted ahead of a walk", "deep", "preempted"):
        assert COVERED[what] >= 3, COVERED
    assert COVERED["timer"] >= 3 or order is not MLFQ, COVERED


def test_order_is_by_key_then_by_submission():
    a, b, c = requests(1, 1, 1, arrivals=[2.0, 1.0, 1.0])
    assert list(queue_of(Fcfs(), [c, a, b])) == [b, c, a]


def test_what_waits_already_or_does_not_wait_is_an_error_that_changes_nothing():
    a, b = requests(1, 1)
    queue = queue_of(Fcfs(), [a])
    with pytest.raises(RuntimeError, match=f"request {b.request_id} is not waiting"):
        queue.remove(b)
    with pytest.raises(RuntimeError, match=f"request {a.request_id} waits already"):
        queue.push(a)
    assert list(queue) == [a]
    queue.remove(a)
    with pytest.raises(RuntimeError, match="is not waiting"):
        queue.remove(a)
    assert (list(queue), queue.head(), len(queue)) == ([], None, 0)


@pytest.mark.parametrize("key", [(float("nan"),), (0, float("nan"))])
def test_a_key_without_an_order_is_an_error_of_the_policy(key):
    class Nan:
        displaces_running = False

        def key(self, state, request):
            return key

    (request,) = requests(1)
    with pytest.raises(RuntimeError, match=rf"admission Nan ranks request {request.request_id} by"):
        queue_of(Nan(), [request])


def test_a_walk_does_not_meet_what_comes_in_before_the_point_it_has_reached():
    first, second, third, early, late = requests(1, 1, 1, 1, 1, arrivals=[1.0, 2.0, 3.0, 0.0, 9.0])
    queue = queue_of(Fcfs(), [first, second, third])
    walked = []
    for request in queue:
        walked.append(request)
        queue.remove(request)
        if request is first:
            queue.push(early)
            queue.push(late)
    assert walked == [first, second, third, late]
    assert list(queue) == [early]


def test_walks_do_not_disturb_each_other():
    waiting = requests(*[1] * 200, arrivals=[float(i) for i in range(200)])
    queue = queue_of(Fcfs(), waiting)
    left = iter(queue)
    assert [next(left) for _ in range(150)] == waiting[:150]
    assert list(islice(queue, 3)) == waiting[:3]
    queue.remove(waiting[151])
    assert [next(left), next(left)] == [waiting[150], waiting[152]]
    del left
    assert list(queue) == [r for r in waiting if r is not waiting[151]]


def test_an_order_that_learns_is_followed_between_two_requests_of_one_walk():
    waiting = requests(5, 1, 1, 1)
    for request, client in zip(waiting, "aabb", strict=True):
        request.origin = Origin(client=client)
    queue = queue_of(Vtc(), waiting)
    walked = []
    for request in queue:
        walked.append(request)
        queue.remove(request)
        queue.tell(Seen(Kind.ENTERED, 0.0, request))
    assert walked == [waiting[0], waiting[2], waiting[3], waiting[1]]  # a has 5, then b 1 and 2


def test_a_timer_moves_whoever_has_waited_long_enough_and_no_one_else():
    long, longer, short = requests(3, 3, 1, arrivals=[1.0, 0.0, 3.0])
    queue = queue_of(MLFQ, [long, longer, short])
    assert list(queue) == [short, longer, long]
    assert queue.next_timer_s() == 4.0
    queue.tell(Seen(Kind.TIMER, 4.0))
    assert list(queue) == [longer, short, long]
    assert queue.next_timer_s() == 5.0
    queue.tell(Seen(Kind.TIMER, 5.5))
    assert list(queue) == [longer, long, short]
    assert queue.next_timer_s() is None


def test_clear_forgets_who_waits_and_what_was_learned():
    a, b = requests(4, 1)
    a.origin, b.origin = Origin(client="a"), Origin(client="b")
    queue = queue_of(Vtc(), [a])
    queue.remove(a)
    queue.tell(Seen(Kind.ENTERED, 0.0, a))
    assert queue.rank(a) == (4.0, 0.0)
    queue.clear()
    assert (list(queue), len(queue), queue.rank(a)) == ([], 0, (0.0, 0.0))


def test_an_order_of_the_step_stands_until_the_next_and_may_leave_out():
    a, b, c, d = requests(1, 1, 1, 1, arrivals=[0.0, 1.0, 2.0, 3.0])
    queue = queue_of(LongestPrefixHit(reorders_at_most=3), [a, b, c])
    cached = {a: 0, b: 8, c: 4, d: 9}
    assert list(queue) == [a, b, c]
    queue.order(cached.__getitem__)
    assert (list(queue), queue.head()) == ([b, c, a], b)
    queue.remove(b)
    assert (list(queue), queue.head()) == ([c, a], c)
    queue.push(d)
    assert list(queue) == [c, a]
    queue.order(cached.__getitem__)
    assert list(queue) == [d, c, a]
    queue.push(b)
    queue.order(cached.__getitem__)  # four are more than it orders
    assert list(queue) == [a, b, c, d]


@pytest.mark.parametrize("wrong", ["twice", "stranger"])
def test_an_order_of_the_step_is_checked(wrong):
    a, stranger = requests(1, 1)

    class Wrong(LongestPrefixHit):
        def reorder(self, requests, num_cached_tokens):
            return [a, a] if wrong == "twice" else [stranger]

    queue = queue_of(Wrong(), [a])
    with pytest.raises(RuntimeError, match="Wrong must order waiting requests"):
        queue.order(lambda request: 0)
    assert list(queue) == [a]


class Light:
    """What the queue and these orders read of a request, in little memory: what is measured is the
    queue, not how long it takes to fetch 100,000 scattered requests into a cache.
    """

    __slots__ = ("arrival_s", "arrival_seq", "num_prompt_tokens", "origin", "request_id")

    def __init__(self, number, origin):
        self.request_id, self.arrival_seq = str(number), number
        self.arrival_s, self.num_prompt_tokens, self.origin = float(number), 2, origin


def light_queue(order, num_waiting):
    """A queue, and the endless stream of requests that it gets."""
    lengths = [1 + 7919 * i % 1000 for i in range(1000)]
    origins = [Origin(client=str(n % 50), num_true_output_tokens=n) for n in lengths]
    stream = (Light(number, origins[number % 1000]) for number in itertools.count())
    return queue_of(order, list(islice(stream, num_waiting))), stream


def one_step(queue, arriving):
    """What a step asks of the queue: some enter and are served, one is refused, some arrive."""
    start = time.perf_counter()
    for num_taken, request in enumerate(queue):
        if num_taken == len(arriving):
            break
        queue.remove(request)
        queue.tell(Seen(Kind.ENTERED, 0.0, request))
        queue.tell(Seen(Kind.SERVED, 0.0, request, 2, 1, 1.0))
    for request in arriving:
        queue.tell(Seen(Kind.ARRIVED, 0.0, request))
        queue.push(request)
    assert queue.head() is not None
    return time.perf_counter() - start


@pytest.mark.parametrize("order", [Fcfs(), Sjf(), Vtc()], ids=["fcfs", "sjf", "vtc"])
def test_a_step_costs_the_same_however_many_wait(order):
    """Medians of interleaved steps, so that a busy machine slows both; the best of three tries."""
    queues = {num: light_queue(order, num) for num in (100, 100_000)}
    ratios = []
    gc.disable()  # its passes grow with whatever else the test process holds
    try:
        for _ in range(3):
            costs = {num: [] for num in queues}
            for _ in range(400):
                for num, (queue, stream) in queues.items():
                    costs[num].append(one_step(queue, list(islice(stream, 3))))
            medians = [statistics.median(cost) for cost in costs.values()]
            ratios.append(medians[1] / medians[0])
    finally:
        gc.enable()
    assert min(ratios) <= 1.3, ratios
