"""Every admission order is a pure ranking, replays equal, and serves everyone."""

import copy
from dataclasses import fields, replace

import pytest
from axes import name_of, policies
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit, tokens_alone
from invariants import check_idle

from paxserve.admission import Learning, Reordering
from paxserve.admission.aging import Aging
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.none import NoCache
from paxserve.request import Origin

ORDERS = [*policies("admission"), Aging(inner="vtc", rate=1.0), Aging(inner="mlfq", rate=1.0)]
per_order = pytest.mark.parametrize("order", ORDERS, ids=name_of)
TIGHT = make_limits(block_size=2, num_blocks=8, max_num_seqs=3, max_model_len=12)


def with_cache(order):
    """An order, and what it needs to have something to go by."""
    cache = HashChain() if isinstance(order, Reordering) else NoCache()
    return {"admission": order, "prefix_cache": cache}


def overloaded(order):
    """An engine at the start of a run that preempts, and the list of all that its order will see
    with the states it had after each.
    """
    engine = make_engine(TIGHT, **with_cache(order))
    seen, tell = [], engine.scheduler.batch.waiting.tell

    def listening(what):
        tell(what)
        seen.append((what, copy.deepcopy(engine.scheduler.batch.waiting._state)))

    engine.scheduler.batch.waiting.tell = listening
    for salt in range(6):
        origin = Origin(client="ab"[salt % 2], priority=salt % 3, num_true_output_tokens=3 + salt)
        submit(engine, prompt_ids(2 + salt % 3, salt), max_tokens=3 + salt, origin=origin)
    return engine, seen


@per_order
def test_keys_are_pure_and_comparable_numbers(order):
    engine, _ = overloaded(order)
    for _ in range(4):
        engine.step()
    queue = engine.scheduler.batch.waiting
    state = copy.deepcopy(queue._state)
    keys = [order.key(state, request) for request in engine.requests]
    assert keys == [order.key(state, request) for request in engine.requests]
    assert keys == [queue.rank(request) for request in engine.requests]
    assert state == queue._state
    assert all(isinstance(part, int | float) for key in keys for part in key)
    assert len({len(key) for key in keys}) == 1
    assert isinstance(order.displaces_running, bool)


@per_order
def test_everyone_is_served_and_the_state_replays_equal(order):
    engine, seen = overloaded(order)
    run_to_end(engine)
    check_idle(engine)
    for salt, request in enumerate(engine.requests):
        expected = tokens_alone(prompt_ids(2 + salt % 3, salt), 3 + salt)
        assert list(request.output_token_ids) == expected
    assert sum(request.num_preemptions for request in engine.requests) > 0
    state = order.init() if isinstance(order, Learning) else None
    for what, state_then in seen:
        if isinstance(order, Learning):
            state = order.observe(state, what)
        assert state == state_then


@per_order
def test_one_row_serves_in_the_order_of_the_queue(order):
    engine = make_engine(make_limits(max_num_seqs=1), **with_cache(order))
    for n in (5, 2, 9, 3):
        submit(engine, prompt_ids(n), max_tokens=1, origin=Origin(priority=n, client=str(n % 2)))
    first = engine.scheduler.batch.waiting.head()
    run_to_end(engine)
    assert min(engine.requests, key=lambda r: r.first_scheduled_s) is first
    assert all(request.num_output_tokens == 1 for request in engine.requests)


@per_order
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "x", object(), True])
def test_settings_that_mean_nothing_are_refused_by_name(order, value):
    for field in fields(order):
        if isinstance(value, bool) and isinstance(getattr(order, field.name), bool):
            continue
        with pytest.raises(ValueError, match=field.name if field.name != "inner" else "inner|adm"):
            replace(order, **{field.name: value})
