"""The search, on servers whose figures are formulas."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve.capacity import Outcome, Saturation, search
from paxserve.service_level import Slo

ITL = Slo.parse(["p99_itl_ms=100"])
BOTH = Slo.parse(["p99_itl_ms=100", "median_queue_time_ms=2000"])


def server(served, *, alone_ms=10.0, queues=True):
    """Serves at most `served` per second; a gap between tokens takes `alone_ms` alone, and
    1 / (1 - load) times as long, ten times as long at most, under load.
    """

    def measure(rate):
        load = rate / served
        slower = min(10.0, 1 / (1 - load)) if load < 1 else 10.0
        return {
            "p99_itl_ms": alone_ms * (slower if queues else 1.0),
            "median_queue_time_ms": 0.0 if load < 1 else 10000 * (load - 1),
            "request_throughput": min(rate, served),
            "output_throughput": 64 * min(rate, served),
            "queue_growth": max(0.0, load - 1),
        }

    return measure


def counted(measure):
    asked = []

    def ask(rate):
        asked.append(rate)
        return measure(rate)

    return ask, asked


@pytest.mark.parametrize("served", [0.02, 0.5, 3.0, 700.0])
@pytest.mark.parametrize("tolerance", [0.2, 0.02, 0.001])
def test_the_answer_is_within_the_tolerance(served, tolerance):
    """20 ms alone and 100 ms are at a load of 0.8."""
    measure, asked = counted(server(served, alone_ms=20))
    found = search(measure, ITL, tolerance=tolerance)
    assert found.outcome is Outcome.FOUND
    assert found.rate <= 0.8 * served * (1 + 1e-9) <= found.broken_at * (1 + 2e-9)
    assert found.broken_at <= found.rate * (1 + tolerance)
    assert len(asked) == len(set(asked)) == len(found.probes)
    doublings = abs(math.log2(0.8 * served)) + 2
    assert len(asked) <= doublings + math.log2(math.log(2) / math.log1p(tolerance)) + 2
    assert [probe.rate for probe in found.probes] == sorted(asked)
    assert found.is_monotone


@given(
    served=st.floats(0.01, 900), alone_ms=st.floats(11, 99), start=st.sampled_from([0.25, 1.0, 7.0])
)
def test_the_answer_for_any_server(served, alone_ms, start):
    found = search(server(served, alone_ms=alone_ms), ITL, start=start)
    exact = served * (1 - alone_ms / 100)
    if found.outcome is Outcome.FOUND:
        assert found.rate <= exact * (1 + 1e-9)
        assert found.broken_at >= exact * (1 - 1e-9)
        assert found.broken_at <= found.rate * 1.02
    elif found.outcome is Outcome.EVERY_RATE:
        assert exact >= found.rate == 1024 * start
    else:  # beyond the limit, or so low that nothing changes any more
        assert exact < max(start / 1024, served * 0.02)


RATES = st.floats(1e-3, 1e4)
SHARES = st.floats(1e-4, 1.0)


@given(start=RATES, share=SHARES, power=st.floats(-2, 2), is_met=st.booleans())
def test_a_search_ends_whatever_its_limits_and_the_figures(start, share, power, is_met):
    """Figures may get worse as the rate falls, and limits have more digits than rates."""
    limits = {"highest": min(start / share, 1e6)} if is_met else {"lowest": share * start}

    def measure(rate):
        assert len(asked) < 100, "the search does not end"
        worse = (rate / start) ** power * (1e-30 if is_met else 1e30)
        return {"p99_itl_ms": worse, "request_throughput": rate, "output_throughput": rate}

    measure, asked = counted(measure)
    found = search(measure, ITL, start=start, **limits)
    assert found.outcome is (Outcome.EVERY_RATE if is_met else Outcome.NO_RATE)
    assert len(asked) == len(set(asked)) <= 2 + math.ceil(math.log2(1 / share) + 1e-3)


@pytest.mark.parametrize("start", [3.0, 7.0, 1 / 3, 6.4000001])
def test_a_search_ends_at_the_lowest_rate_it_was_not_told(start):
    measure, asked = counted(lambda rate: {"p99_itl_ms": 1e9 / rate if len(asked) < 99 else 0.0})
    found = search(measure, ITL, start=start)
    assert found.outcome is Outcome.NO_RATE
    assert found.probes[0].rate == pytest.approx(start / 1024, rel=1e-5)
    assert len(asked) <= 12


def test_an_slo_that_no_rate_meets():
    """Found after few probes: half the rate changes nothing any more."""
    measure, asked = counted(server(3.0, alone_ms=150))
    found = search(measure, ITL)
    assert (found.outcome, found.rate) == (Outcome.NO_RATE, None)
    assert found.broken_at == min(asked)
    assert len(asked) < 9
    assert found.answer().startswith("no rate meets p99_itl_ms <= 100: at ")
    assert "p99_itl_ms is 15" in found.answer()
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["rate"] is None


def test_a_start_far_beyond_saturation_is_no_answer():
    """There, half the rate changes little as well."""
    found = search(server(0.01, alone_ms=20), ITL, start=1.0)
    assert found.outcome is Outcome.FOUND
    assert found.rate == pytest.approx(0.008, rel=0.02)


def test_an_slo_that_every_rate_meets():
    """Saturated, and still met: twice the rate brings nothing more."""
    measure, asked = counted(server(3.0, queues=False))
    found = search(measure, ITL)
    assert (found.outcome, found.broken_at) == (Outcome.EVERY_RATE, None)
    assert asked == [1, 2, 4, 8, 16]
    assert found.rate == 16
    assert "is met at every rate tried, up to 16/s" in found.answer()
    assert "the queue grows there: with more requests it would be lower" in found.answer()
    assert "saturated from 4/s on, at 192.0 output tokens/s" in found.answer()


def test_the_highest_rate_is_a_limit():
    found = search(server(1000.0), ITL, highest=100.0)
    assert (found.outcome, found.rate, found.broken_at) == (Outcome.EVERY_RATE, 100, None)
    assert "no saturation was seen up to 100/s" in found.answer()


def test_the_lowest_rate_is_a_limit():
    found = search(server(0.01, alone_ms=20), ITL, lowest=0.5)
    assert (found.outcome, found.broken_at) == (Outcome.NO_RATE, 0.5)


def test_saturation_is_seen():
    found = search(server(3.0, queues=False), BOTH, tolerance=0.01)
    assert found.outcome is Outcome.FOUND
    assert found.rate == pytest.approx(3.6, rel=0.01)  # a queue of 2 s at a load of 1.2
    assert found.is_saturated
    assert found.saturation == Saturation(rate=found.saturation.rate, output_throughput=192.0)
    assert 3.0 < found.saturation.rate < 3.6
    assert found.to_json()["saturation"]["output_throughput"] == 192.0


def test_no_saturation_where_more_requests_bring_more():
    found = search(server(3.0, alone_ms=50), ITL)
    assert found.saturation is None
    assert not found.is_saturated
    assert found.to_json()["saturation"] is None


def test_no_saturation_without_a_growing_queue():
    """A closed loop has an end to its throughput, and no queue."""

    def measure(rate):
        return {**server(3.0, queues=False)(rate), "queue_growth": None}

    assert search(measure, ITL).saturation is None


def test_probes_that_contradict_each_other_are_told():
    """Bad between 2.5 and 3.5, good again up to 9: from 5 the answer is 9, from 3 it is 2.5."""

    def measure(rate):
        is_bad = 2.5 < rate < 3.5 or rate > 9
        return {**server(100.0)(rate), "p99_itl_ms": 200.0 if is_bad else 1.0}

    assert search(measure, ITL, start=5.0).rate == pytest.approx(9, rel=0.02)
    assert search(measure, ITL, start=3.0).rate == pytest.approx(2.5, rel=0.02)
    probes = search(measure, ITL, start=5.0).probes + search(measure, ITL, start=3.0).probes
    both = replace(search(measure, ITL), probes=tuple(sorted(probes, key=lambda p: p.rate)))
    assert not both.is_monotone
    assert search(measure, ITL).is_monotone


def test_an_undefined_figure_is_an_error():
    def measure(rate):
        return {**server(3.0)(rate), "p99_itl_ms": None}

    with pytest.raises(ValueError, match="at rate 1: p99_itl_ms is undefined"):
        search(measure, ITL)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tolerance": 0}, "tolerance must be a number from 0.0001 to 1"),
        ({"tolerance": math.nan}, "tolerance must be"),
        ({"start": 0}, "start must be a number above 0"),
        ({"lowest": 2.0}, "lowest rate must be a number above 0 to 1, got 2.0"),
        ({"highest": 0.5}, "highest rate must be a number from 1 to 1e.06, got 0.5"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        search(server(3.0), ITL, **settings)


def test_rates_can_be_read_and_found_again():
    one, two = (search(server(3.7), ITL).probes for _ in range(2))
    assert [p.rate for p in one] == [p.rate for p in two]
    assert all(p.rate == float(f"{p.rate:.6g}") for p in one)


def test_everybody_is_told_of_probes():
    told = []
    found = search(server(3.0), ITL, on_probe=told.append)
    assert sorted(told, key=lambda probe: probe.rate) == list(found.probes)
