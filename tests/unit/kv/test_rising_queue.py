"""A queue whose entries come in about the order in which they go, against sorting."""

from heapq import heappop, heappush

from hypothesis import given
from hypothesis import strategies as st

from paxserve.kv.rising_queue import RisingQueue

ENTRIES = st.tuples(st.integers(0, 9), st.integers(-3, 3))


@given(first=st.lists(ENTRIES), operations=st.lists(st.one_of(st.none(), ENTRIES)))
def test_entries_come_out_as_of_a_heap(first, operations):
    queue, heap = RisingQueue((*e, i) for i, e in enumerate(first)), []
    for number, entry in enumerate(first):
        heappush(heap, (*entry, number))
    for number, entry in enumerate(operations, start=len(first)):
        if entry is not None:
            queue.push((*entry, number))
            heappush(heap, (*entry, number))
        elif heap:
            assert queue.pop() == heappop(heap)
        assert len(queue) == len(heap)
    assert [queue.pop() for _ in range(len(queue))] == sorted(heap)
