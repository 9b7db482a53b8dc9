"""The order of `SortedEntries` against a sorted list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxserve import sorted_entries
from paxserve.sorted_entries import SortedEntries

NUMBERS = st.integers(0, 40)


@pytest.fixture(autouse=True)
def short_front(monkeypatch):
    monkeypatch.setattr(sorted_entries, "FRONT", 2)


def walked(entries):
    found, entry = [], entries.first()
    while entry is not None:
        found.append(entry)
        entry = entries.after(entry)
    return found


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["toggle", "walk", "after", "first"]), NUMBERS)))
def test_it_is_a_sorted_list_whatever_happens_in_between(operations):
    entries, model = SortedEntries(), set()
    for operation, number in operations:
        entry = (number,)
        match operation:
            case "toggle" if entry in model:
                entries.remove(entry)
                model.remove(entry)
            case "toggle":
                entries.add(entry)
                model.add(entry)
            case "walk":
                assert walked(entries) == sorted(model)
            case "after":
                assert entries.after(entry) == min((e for e in model if e > entry), default=None)
            case "first":
                assert entries.first() == min(model, default=None)
        assert len(entries) == len(model)
    assert walked(entries) == sorted(model)


def test_what_was_removed_far_behind_does_not_pile_up():
    entries = SortedEntries()
    for number in range(10):
        entries.add((number,))
    assert entries.first() == (0,)
    for number in range(100, 2000):
        entries.add((number,))
        entries.remove((number,))
    assert len(entries._back) + len(entries._removed) < 40
    assert walked(entries) == [(number,) for number in range(10)]


def test_the_front_stays_short_when_ever_better_ones_come():
    entries = SortedEntries()
    for number in range(100, 0, -1):
        entries.add((number,))
        assert entries.first() == (number,)
        assert len(entries._front) <= 2 * sorted_entries.FRONT
    assert walked(entries) == [(number,) for number in range(1, 101)]
