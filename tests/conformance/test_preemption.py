"""Every preemption policy answers purely with a method the scheduler knows."""

import itertools
from dataclasses import replace

import pytest
from axes import name_of, policies
from builders import (
    make_engine,
    make_limits,
    make_request,
    prompt_ids,
    run_to_end,
    submit,
    tokens_alone,
)

from paxserve.events import Kind
from paxserve.preemption import Method, VictimView
from paxserve.preemption.cheapest import Cheapest
from paxserve.preemption.recompute import Recompute
from paxserve.preemption.swap import Swap

PREEMPTIONS = policies("preemption")
per_preemption = pytest.mark.parametrize("preemption", PREEMPTIONS, ids=name_of)
TIGHT = make_limits(block_size=2, num_blocks=8, max_num_seqs=3, max_model_len=12)


@per_preemption
def test_a_method_is_one_the_scheduler_knows_and_its_choice_is_pure(preemption):
    request = make_request()
    allowed = set(Method) if preemption.swaps else {Method.RECOMPUTE}
    for sizes in itertools.product((0, 1, 17, 4096), (0, 1, 40), (0, 40)):
        method = preemption.choose(request, VictimView(*sizes))
        assert method in allowed
        assert preemption.choose(request, VictimView(*sizes)) is method


@per_preemption
def test_however_they_are_preempted_every_request_ends_with_its_tokens(preemption):
    engine = make_engine(replace(TIGHT, num_host_blocks=9), preemption=preemption)
    for salt in range(6):
        submit(engine, prompt_ids(2 + salt % 3, salt), max_tokens=3 + salt)
    run_to_end(engine)
    for salt, request in enumerate(engine.requests):
        expected = tokens_alone(prompt_ids(2 + salt % 3, salt), 3 + salt)
        assert list(request.output_token_ids) == expected
    preempted = [e for e in engine.events if e.kind is Kind.PREEMPTED]
    assert preempted
    assert {e.detail for e in preempted} <= {str(method) for method in Method}


@pytest.mark.parametrize("sizes", [(1, 1, 0), (16, 1, 500), (2000, 125, 0), (2000, 125, 500)])
def test_the_plain_methods_ask_for_nothing(sizes):
    assert Recompute().choose(make_request(), VictimView(*sizes)) is Method.RECOMPUTE
    assert Swap().choose(make_request(), VictimView(*sizes)) is Method.SWAP


def test_the_cheaper_method_is_chosen_and_a_tie_is_recomputed():
    by_halves = Cheapest(
        recompute_s_per_token=0.5, swap_s_per_token=0.25, swap_s_per_block=2.0
    )  # 8 tokens: 4 s against 2 s and 2 s per block
    request = make_request()
    assert by_halves.choose(request, VictimView(8, 1, 99)) is Method.RECOMPUTE
    assert by_halves.choose(request, VictimView(9, 1, 99)) is Method.SWAP
    assert by_halves.choose(request, VictimView(9, 2, 99)) is Method.RECOMPUTE
    assert by_halves.choose(request, VictimView(17, 2, 99)) is Method.SWAP


MEASURED_MS = {1: 137.5, 2: 89.4, 4: 61.2, 8: 47.2, 16: 40.3, 32: 36.7, 64: 35.1, 128: 34.0}
NUM_TOKENS = 1024


@pytest.mark.parametrize(("block_size", "measured_ms"), MEASURED_MS.items())
def test_the_default_estimate_is_the_published_curve_and_crosses_where_it_does(
    block_size, measured_ms
):
    """SOSP'23, Fig. 19a: swapping out and in; recomputing is flat between 36.5 and 39.2 ms."""
    cheapest = Cheapest()
    num_blocks = NUM_TOKENS // block_size
    swap_s = NUM_TOKENS * cheapest.swap_s_per_token + num_blocks * cheapest.swap_s_per_block
    assert 1e3 * swap_s == pytest.approx(measured_ms, rel=0.04)
    assert 36.5 <= 1e3 * NUM_TOKENS * cheapest.recompute_s_per_token <= 39.2
    method = cheapest.choose(make_request(), VictimView(NUM_TOKENS, num_blocks, 0))
    assert method is (Method.RECOMPUTE if block_size <= 16 else Method.SWAP)


@pytest.mark.parametrize("name", ["recompute_s_per_token", "swap_s_per_token", "swap_s_per_block"])
@pytest.mark.parametrize(
    "value", [-1e-6, float("nan"), float("inf"), 61, 10**400, True, "0.1", None]
)
def test_what_is_no_duration_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds from 0 to 60, got"):
        Cheapest(**{name: value})
