"""Goodput and the growth of a queue, counted by hand; and what an SLO says."""

from collections import namedtuple

import numpy as np
import pytest

from paxserve.service_level import FIELDS, RequestBounds, Slo, figure_names, queue_growth

Times = namedtuple("Times", FIELDS)
NONE = Times("stop", 0.0, 0.0, None, None, None)
RECORDS = [
    NONE._replace(ttft_s=0.4, tpot_s=0.1, e2e_s=2.0),  # on the edge: kept
    NONE._replace(ttft_s=0.41, tpot_s=0.1, e2e_s=2.0),
    NONE._replace(ttft_s=0.1, tpot_s=0.11, e2e_s=2.0),
    NONE._replace(ttft_s=0.1, tpot_s=None, e2e_s=0.1, finish_reason="length"),  # one token
    NONE._replace(ttft_s=0.1, tpot_s=0.01, e2e_s=1.0, finish_reason="error"),
    NONE._replace(ttft_s=0.1, tpot_s=0.01, e2e_s=1.0, finish_reason="abort"),
]


def columns(records):
    """As a summary is made from."""
    found = {name: [getattr(record, name) for record in records] for name in FIELDS}
    return {
        name: np.array(values, object if name == "finish_reason" else float)
        for name, values in found.items()
    }


def test_goodput_counts_requests_that_keep_every_bound():
    bounds = RequestBounds(ttft_ms=400, tpot_ms=100)
    assert bounds.are_kept(columns(RECORDS)).tolist() == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert bounds.goodput(columns(RECORDS), num_sent=8, duration_s=4.0) == {
        "goodput_share": 0.25,
        "request_goodput": 0.5,
    }
    assert RequestBounds(e2e_ms=1999).goodput(columns(RECORDS), num_sent=6, duration_s=1.0) == {
        "goodput_share": 1 / 6,
        "request_goodput": 1.0,
    }


def test_goodput_without_bounds_or_requests():
    assert RequestBounds().goodput(columns(RECORDS), num_sent=6, duration_s=1.0) == {}
    assert RequestBounds(ttft_ms=1).goodput(columns([]), num_sent=0, duration_s=0.0) == {
        "goodput_share": None,
        "request_goodput": None,
    }


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), "fast", True])
def test_a_bound_is_a_positive_number(bound):
    with pytest.raises(ValueError, match="ttft_ms must be a number above 0"):
        RequestBounds(ttft_ms=bound)


@pytest.mark.parametrize("load", [0.5, 1.0, 1.25, 2.0])
def test_queue_growth_is_how_much_more_arrives_than_is_served(load):
    """One server, one second per request, arrivals at even distances."""
    free_s, records = 0.0, []
    for number in range(100):
        arrival_s = number / load
        start_s = max(free_s, arrival_s)
        free_s = start_s + 1.0
        records.append(NONE._replace(arrival_s=arrival_s, queue_time_s=start_s - arrival_s))
    assert queue_growth(columns(records[::-1])) == pytest.approx(max(0.0, load - 1), abs=1e-9)


def test_only_the_later_half_counts():
    """A burst at the start that is worked off is no growth."""
    records = [
        NONE._replace(arrival_s=float(n), queue_time_s=max(0.0, 20.0 - n)) for n in range(60)
    ]
    assert queue_growth(columns(records)) == 0.0


def test_queue_growth_of_little():
    assert queue_growth(columns(RECORDS)) is None
    assert queue_growth(columns([NONE] * 100)) is None  # all at once


def test_an_slo_is_read():
    slo = Slo.parse(["p99_itl_ms=100", "ttft_ms<=400 tpot_ms<=80 share>=0.9", "failed<=0"])
    assert [str(bound) for bound in slo.bounds] == [
        "p99_itl_ms <= 100", "goodput_share >= 0.9", "failed <= 0",
    ]  # fmt: skip
    assert slo.per_request == RequestBounds(ttft_ms=400, tpot_ms=80)
    assert str(slo) == (
        "p99_itl_ms <= 100, goodput_share >= 0.9 (of ttft_ms <= 400, tpot_ms <= 80), failed <= 0"
    )
    figures = {"p99_itl_ms": 100.0, "goodput_share": 0.9, "failed": 0}
    assert slo.unmet(figures) == ()
    worse = {"p99_itl_ms": 100.1, "goodput_share": 0.89, "failed": 1}
    assert slo.unmet(worse) == slo.bounds


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "the SLO is empty"),
        ([" "], "the SLO is empty"),
        (["p99_itl_ms"], "'p99_itl_ms' is no condition"),
        (["p99_itl_ms<100"], "'p99_itl_ms<100' is no condition"),
        (["p99_itl_ms=fast"], "must bound p99_itl_ms by a number >= 0"),
        (["p99_itl_ms=nan"], "must bound p99_itl_ms by a number >= 0"),
        (["p99_itl_ms=-5"], "must bound p99_itl_ms by a number >= 0"),
        (["p98_itl_ms=5"],
         "p98_itl_ms is no figure of a run; there are p99_itl_ms, p90_itl_ms, .*, share"),
        (["p99_itl_ms=5 p99_itl_ms=6"], "bounds p99_itl_ms more than once"),
        (["request_throughput>=5"], "must be a most: only share has a least"),
        (["ttft_ms<=5"], "needs bounds and a share"),
        (["share>=0.9"], "needs bounds and a share"),
        (["ttft_ms>=5 share>=0.9"], "ttft_ms >= 5 must be a most"),
        (["ttft_ms<=0 share>=0.9"], "ttft_ms must be a number above 0"),
        (["ttft_ms<=5 share>=1.1"], "must be a share of requests"),
        (["ttft_ms<=5 share<=0.9"], "must be a share of requests"),
    ],
)  # fmt: skip
def test_what_is_no_slo(texts, words):
    with pytest.raises(ValueError, match=words):
        Slo.parse(texts)


@pytest.mark.parametrize("figure", [None, float("nan"), float("inf")])
def test_nothing_is_said_of_an_undefined_figure(figure):
    with pytest.raises(ValueError, match="p99_itl_ms is undefined"):
        Slo.parse(["p99_itl_ms=5"]).unmet({"p99_itl_ms": figure})


def test_figures_are_known_without_a_run():
    names = figure_names()
    assert {"p99_itl_ms", "median_queue_time_ms", "goodput_share", "kv_share_live"} <= names
    assert "kv_share_null" not in names
