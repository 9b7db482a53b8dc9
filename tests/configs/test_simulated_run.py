"""`paxserve run executor=simulated`: every term of a step's time stands in `steps.parquet`."""

import json
import sys

import pyarrow.parquet as pq
import pytest

from paxserve.cli import main
from paxserve.cost_model.roofline import TERMS

REQUESTS = ("workload=synthetic", "workload.num_requests=6", "workload/arrivals=all_at_once",
            "workload.lengths.input_tokens=40", "workload.lengths.output_tokens=9")  # fmt: skip
LLAMA = ("executor=simulated", "model=llama-3-8b", "hardware=a100-80g")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])

    def of(*overrides):
        assert main(["run", *LLAMA, *REQUESTS, "run_dir=results", *overrides]) == 0
        return pq.read_table(tmp_path / "results" / "steps.parquet").to_pylist()

    return of


def test_terms_of_a_roofline(run):
    steps = run("cost_model.host_s_per_step=0.001")
    assert len(steps) == 9
    for step in steps:
        assert sum(step[f"{term}_s"] for term in TERMS) == pytest.approx(step["duration_s"])
        assert step["host_s"] == 0.001
        assert step["linear_s"] > step["head_s"] > 0
    assert steps[0]["chunk_attention_s"] > 0 == steps[0]["decode_attention_s"]
    assert steps[1]["decode_attention_s"] > 0 == steps[1]["chunk_attention_s"]


def test_terms_of_a_profile(run, tmp_path):
    fit = {
        "prefill": [10.0, 0.5, 0.01],
        "decoding_smallbs": [4.0, 0.25, 2.0],
        "decoding_largebs": [4.0, 0.25, 2.0],
        "decoding_large_small_bs_threshold": 95,
    }
    path = tmp_path / "fits.json"
    path.write_text(json.dumps({"llama": {"1": fit}}))
    steps = run("cost_model=table", "cost_model.format=distserve", "cost_model.entry=llama",
                f"cost_model.path={path}")  # fmt: skip
    assert steps[0]["fixed_s"] == 0.01
    assert steps[0]["prompt_pairs_s"] == pytest.approx(6 * 1600 * 0.01e-3)
    assert steps[1]["decode_rows_s"] == pytest.approx(6 * 2.0e-3)
    assert steps[1]["duration_s"] == pytest.approx((4 + 6 * 41 * 0.25 + 12) * 1e-3)
