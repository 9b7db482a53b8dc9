"""Every reservation is a pure function that promises at least what is needed."""

import copy
import dataclasses

import pytest
from axes import name_of, policies
from builders import (
    make_engine,
    make_intake,
    make_limits,
    make_request,
    prompt_ids,
    run_to_end,
    submit,
)
from hypothesis import given
from hypothesis import strategies as st

from paxserve.request import Origin
from paxserve.reservation.oracle import Oracle
from paxserve.reservation.pow2 import Pow2

per_reservation = pytest.mark.parametrize("reservation", policies("reservation"), ids=name_of)


@per_reservation
@given(
    max_model_len=st.integers(2, 40),
    length=st.integers(1, 39),
    max_tokens=st.one_of(st.none(), st.integers(1, 50)),
    data=st.data(),
)
def test_promise_covers_the_need_stays_within_the_model_and_is_pure(
    reservation, max_model_len, length, max_tokens, data
):
    limits = make_limits(max_model_len=max_model_len)
    intake = make_intake(limits)
    request = make_request(
        min(length, max_model_len - 1), intake=intake, max_tokens=max_tokens, ignore_eos=True
    )
    needed = data.draw(st.integers(1, request.max_known_tokens - 1))
    before = copy.deepcopy(dataclasses.asdict(request))
    promise = reservation.num_tokens(request, num_needed=needed, limits=limits)
    assert needed <= promise <= max_model_len
    assert reservation.num_tokens(request, num_needed=needed, limits=limits) == promise
    assert dataclasses.asdict(request) == before
    more = data.draw(st.integers(needed, request.max_known_tokens - 1))
    assert reservation.num_tokens(request, num_needed=more, limits=limits) >= promise
    if not reservation.grows:
        assert reservation.num_tokens(request, num_needed=more, limits=limits) == promise


@per_reservation
def test_what_does_not_grow_never_asks_the_placement_again_nor_preempts(reservation):
    limits = make_limits(block_size=2, num_blocks=13, max_model_len=12, max_num_seqs=3)
    engine = make_engine(limits, reservation=reservation)
    for salt in range(5):
        submit(engine, prompt_ids(3, salt), max_tokens=9)
    run_to_end(engine)
    entered = {entry.sequence_id for p in engine.executor.plans for entry in p.entries}
    assert entered == set(range(5))
    writes = sum(len(p.table_writes) for p in engine.executor.plans)
    if reservation.grows:
        assert writes > 5
    else:
        assert writes == 5  # one for each request, when it entered
        assert all(r.num_preemptions == 0 for r in engine.requests)


@pytest.mark.parametrize(
    ("num_true", "pow2", "oracle"),
    [
        (1, 11, 10),
        (2, 12, 11),
        (25, 42, 34),
        (32, 42, 41),
        (33, 64, 42),
        (54, 64, 63),
        (99, 64, 63),
    ],
)
def test_promises_by_true_length_for_a_prompt_of_10_and_at_most_64_tokens(num_true, pow2, oracle):
    limits = make_limits(max_model_len=64, max_num_batched_tokens=64)
    for max_tokens in (1, 40, None):  # what was asked for is not what will come
        request = make_request(
            10,
            intake=make_intake(limits),
            origin=Origin(num_true_output_tokens=num_true),
            max_tokens=max_tokens,
        )
        for reservation, promise in ((Pow2(), pow2), (Oracle(), oracle)):
            assert reservation.num_tokens(request, num_needed=1, limits=limits) == promise
            assert reservation.num_tokens(request, num_needed=60, limits=limits) == max(promise, 60)


@per_reservation
def test_only_what_says_so_needs_the_true_length(reservation):
    request = make_request(10, origin=Origin())
    if reservation.needs_true_lengths:
        assert not reservation.grows
        with pytest.raises(AssertionError, match=request.request_id):
            reservation.num_tokens(request, num_needed=10, limits=make_limits())
    else:
        assert reservation.num_tokens(request, num_needed=10, limits=make_limits()) >= 10
