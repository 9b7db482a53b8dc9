"""The log of steps as columns, against a list of records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve.records import StepLog, StepRecord

FIELDS = {
    name: st.integers(0, 2**40) if name not in ("start_s", "duration_s", "compile_s") else
    st.floats(0, 1e9)
    for name in StepRecord._fields
    if name != "terms_s"
}  # fmt: skip


def records(num_terms):
    terms = st.tuples(*[st.floats(0, 1e3)] * num_terms)
    return st.lists(st.builds(StepRecord, **FIELDS, terms_s=terms), max_size=6)


@given(data=st.data(), num_terms=st.integers(0, 3))
def test_the_log_is_the_list_of_its_records(data, num_terms):
    expected = data.draw(records(num_terms))
    log = StepLog(expected)
    assert len(log) == len(expected)
    assert log == expected
    assert list(log) == expected
    assert log[1:-1] == expected[1:-1]
    assert [log[i] for i in range(-len(log), len(log))] == expected + expected
    for name in StepRecord._fields:
        column = log.column(name).tolist()
        assert list(map(tuple, column) if name == "terms_s" else column) == [
            getattr(record, name) for record in expected
        ]


@pytest.mark.parametrize("index", [0, -1])
def test_an_index_beyond_the_log_is_an_error(index):
    with pytest.raises(IndexError, match=f"step {index} of 0"):
        StepLog()[index]
