"""Scores of simulated against measured runs, and the study's stored factors."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.fidelity_vllm.fit import CARDS, SCORED, folder_of, simulate
from experiments.fidelity_vllm.run import read_factors
from experiments.fidelity_vllm.score import distance, running_score, score, throughput
from experiments.fidelity_vllm.served import Served, read_measured

DATA = os.environ.get("PAXSERVE_DATA")
ALL = slice(0, None)

# Four requests of 11, 21, 11, 11 tokens; ticks every second.
MEASURED = Served(
    arrivals_s=np.array([0.0, 1.0, 2.0, 3.0]),
    firsts_s=np.array([1.0, 2.0, 4.0, 5.0]),
    lasts_s=np.array([2.0, 4.0, 5.0, 7.0]),
    num_outputs=np.array([11, 21, 11, 11]),
    ticks_s=np.arange(9.0),
    running=np.array([0, 1, 2, 1, 2, 2, 1, 1, 0]),
)


def test_a_run_is_as_near_to_itself_as_can_be():
    scores = score(MEASURED, MEASURED, ALL)
    assert [one.error for one in scores] == [0] * 5
    assert all(one.holds for one in scores)
    assert distance(MEASURED, MEASURED, ALL) == 0


def test_figures_are_what_they_are_called():
    named = {one.figure: one.measured for one in score(MEASURED, MEASURED, ALL)}
    assert named["mean TTFT, s"] == pytest.approx(np.mean([1, 1, 2, 2]))
    assert named["mean TPOT, ms"] == pytest.approx(np.mean([100, 100, 100, 200]))
    assert named["p90 TPOT, ms"] == pytest.approx(np.percentile([100, 100, 100, 200], 90))
    assert named["output throughput, tokens/s"] == pytest.approx(54 / 7)
    assert named["running requests over time"] == pytest.approx(np.mean([1, 2, 1, 2, 2, 1, 1]))
    assert throughput(MEASURED, slice(2, 4)) == pytest.approx(22 / (7 - 2))


def test_errors_are_relative_to_what_was_measured_and_of_the_slice_only():
    slow = replace(MEASURED, firsts_s=MEASURED.firsts_s + np.array([0, 0, 1, 1]),
                   lasts_s=MEASURED.lasts_s + np.array([0, 0, 2, 2]))  # fmt: skip
    first, second = (score(MEASURED, slow, requests) for requests in (slice(0, 2), slice(2, 4)))
    assert [one.error for one in first] == [0] * 5
    named = {one.figure: one for one in second}
    assert named["mean TTFT, s"].error == pytest.approx(3 / 2 - 1)
    assert named["mean TPOT, ms"].error == pytest.approx(250 / 150 - 1)
    assert named["output throughput, tokens/s"].error == pytest.approx(5 / 7 - 1)
    assert not named["mean TTFT, s"].holds
    assert distance(MEASURED, slow, slice(2, 4)) > 0.3
    assert distance(MEASURED, slow, slice(0, 2)) == 0


def test_running_requests_are_compared_at_the_measured_ticks():
    more = replace(MEASURED, running=MEASURED.running + np.array([9, 1, -1, 0, 0, 0, 0, 0, 9]))
    found = running_score(MEASURED, more, ALL)  # from 1 s to 7 s
    assert found.error == pytest.approx(2 / 10)  # differences do not cancel
    assert found.simulated == pytest.approx(found.measured)
    often = replace(MEASURED, ticks_s=MEASURED.ticks_s + 0.25)  # as at the last tick before
    np.testing.assert_array_equal(often.running_at(np.array([0.0, 0.25, 1.0, 2.25])), [0, 0, 0, 2])


def test_the_clocks_of_a_measured_run_are_brought_together(tmp_path):
    queued = [100.5, 101.1, 102.2]  # the second waited least: it says where the clock stands
    requests = [
        {
            "arrival_time": 1000.0 + arrival,
            "queued_ts": at,
            "first_token_ts": at + 1,
            "last_token_ts": at + 3,
            "output_toks": 5,
        }
        for arrival, at in zip((0.0, 1.0, 2.0), queued, strict=True)
    ]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    (tmp_path / "requests.jsonl").write_text(lines)
    late = 0.6  # the ticks begin before the first arrival
    rows = []
    for tick in np.arange(1.0, 8.0, 0.25):
        now = 100.1 + tick - late
        present = sum(at <= now < at + 3 for at in queued)
        rows.append(f"{tick},{min(present, 2)},{max(present - 2, 0)}\n")
    (tmp_path / "timeseries.csv").write_text("t,running,waiting\n" + "".join(rows))
    found = read_measured(tmp_path)
    assert found.arrivals_s.tolist() == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(found.firsts_s, [1.4, 2.0, 3.1], atol=1e-9)
    np.testing.assert_allclose(found.lasts_s, [3.4, 4.0, 5.1], atol=1e-9)
    assert found.ticks_s[0] == pytest.approx(1.0 - late, abs=0.15)


@pytest.mark.skipif(not DATA, reason="PAXSERVE_DATA is not set: no measured runs")
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.folder)
def test_stored_factors_hold_on_the_requests_that_were_not_fitted(card):
    measured = read_measured(folder_of(card, Path(DATA)))
    simulated = simulate(card, read_factors()[card.folder], Path(DATA))
    scores = score(measured, simulated, SCORED)
    assert len(scores) == 5
    assert all(one.holds for one in scores), scores
