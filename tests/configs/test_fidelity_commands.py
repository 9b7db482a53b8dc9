"""`paxserve calibrate` and `paxserve fidelity`, on the tiny model: no test looks at how long
anything takes, only at what is made of it.
"""

import json
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from real_builders import keep_compiled_programs

from paxserve.cli import main
from paxserve.fidelity.pacing import Paced, last_arrival_s
from paxserve.fidelity.trial import FIGURES, Compared
from paxserve.step_profile import TERMS, read_profile
from paxserve.workload import Arrival
from paxserve.workload.sources.conversations import Conversations, KnownRequest
from paxserve.workload.sources.listed import Listed

SIZES = (
    "model=tiny",
    "hardware=host-cpu",
    "limits.max_num_seqs=4",
    "limits.max_model_len=128",
    "limits.max_num_batched_tokens=64",
    "limits.row_buckets=[4]",
    "limits.token_buckets=[64]",
)
WORKLOAD = (
    "workload=synthetic",
    "workload.num_requests=12",
    "workload.arrivals.rate=200",
    "workload/lengths=fixed",
    "workload.lengths.input_tokens=20",
    "workload.lengths.output_tokens=6",
)
AT_ONCE = (WORKLOAD[0], "workload/arrivals=all_at_once")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    keep_compiled_programs()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


def test_calibrate_then_simulate(workplace, capsys):
    assert main(["calibrate", *SIZES, "--out", "p.json", "--repetitions", "1"]) == 0
    said = capsys.readouterr().out
    assert "held out: other shapes" in said
    assert "profile: p.json" in said
    profile = read_profile(workplace / "p.json")
    assert [regime[:2] for regime in profile.regimes] == [(4, 4), (64, 4)]
    assert all(sum(regime.seconds) > 0 for regime in profile.regimes)
    assert (profile.hardware, profile.device) == ("host CPU", "cpu")
    assert (profile.sampling, profile.kernel) == ("greedy", "xla")
    assert profile.errors["fitted"].num_steps > 40
    assert profile.errors["held_out"].num_steps == 32
    assert profile.errors["served"].num_steps > 8
    assert profile.host_s_per_step > 0

    fitted = ("executor=simulated", "executor.pads=true", "cost_model=fitted",
              "cost_model.path=p.json")  # fmt: skip
    assert main(["run", *SIZES, *WORKLOAD, *fitted, "run_dir=run"]) == 0
    steps = pq.read_table("run/steps.parquet").to_pydict()
    terms = np.array([steps[f"{term}_s"] for term in TERMS])
    assert steps["duration_s"] == pytest.approx(terms.sum(0).tolist(), rel=1e-12)
    assert set(zip(steps["padded_tokens"], steps["padded_rows"], strict=True)) == {(4, 4), (64, 4)}

    assert main(["run", *SIZES, *WORKLOAD, *fitted, "limits.block_size=8", "run_dir=b"]) == 2
    assert "block_size=16, and block_size=8 is to be simulated" in capsys.readouterr().err
    assert main(["run", *SIZES, *WORKLOAD, *fitted, "sampling=random", "run_dir=d"]) == 2
    assert "sampling=greedy, and sampling=sampled is to be simulated" in capsys.readouterr().err
    unpadded = [o for o in fitted if "pads" not in o]
    without = [o for o in SIZES if "buckets" not in o]
    assert main(["run", *without, *WORKLOAD, *unpadded, "run_dir=c"]) == 1
    assert "set executor.pads=true" in capsys.readouterr().err


def test_fidelity_of_the_tiny_model(workplace, capsys):
    code = main(["fidelity", *SIZES, *WORKLOAD, "--calibrate", "--repetitions", "1", "--repeats",
                 "2", "--load", "0.5", "--json", "f.json"])  # fmt: skip
    found = json.loads((workplace / "f.json").read_text())
    assert code == (0 if found["holds"] else 1)
    assert found["retold"]["is_equal"] is True
    assert found["retold"]["num_decisions"] > 48
    assert set(found["timed"]) == set(FIGURES)
    assert [figure["name"] for figure in found["figures"]] == list(FIGURES)
    for figure in found["figures"]:
        assert len(figure["real"]) == len(figure["simulated"]) == 2
        real, simulated = np.median(figure["real"]), np.median(figure["simulated"])
        assert figure["error"] == pytest.approx(simulated / real - 1)
    for of in ("real", "simulated"):
        assert [one["completed"] for one in found[of]] == [12, 12]
        # Twelve requests spread over a time in which the engine could serve twice as many.
        assert found[of][0]["duration"] > 12 / found["capacity_requests_per_s"]
    assert len(found["profiles"]) == 2
    said = capsys.readouterr().out
    assert "median_ttft_ms" in said
    assert f"{found['retold']['num_decisions']} decisions equal, every figure equal" in said


def test_fidelity_of_a_cost_model_that_is_far_off(workplace, capsys):
    slow = ("cost_model.host_s_per_step=0.5", "hardware=host-cpu")
    assert main(["fidelity", *SIZES, *WORKLOAD, *slow, "--repeats", "1", "--json", "f.json"]) == 1
    found = json.loads((workplace / "f.json").read_text())
    assert not found["holds"]
    assert found["capacity_requests_per_s"] is None
    errors = {figure["name"]: figure["error"] for figure in found["figures"]}
    assert errors["median_tpot_ms"] > 1
    assert "NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", *SIZES, "--out", "missing/p.json"], "--out missing/p.json"),
        (["calibrate", *SIZES, "--out", "p.json", "--repetitions", "0"], "--repetitions must be"),
        (["calibrate", *SIZES, *WORKLOAD, "--out", "p.json"], "but nothing reads it"),
        (["calibrate", *SIZES, "cost_model.host_s_per_step=1", "--out", "p.json"],
         "cost_model.host_s_per_step was set, but nothing reads it"),
        (["calibrate", "model=tiny", "--out", "p.json"], "say what it is, as in hardware=host-cpu"),
        (["calibrate", *SIZES, "executor=simulated", "--out", "p.json"], "executor=simulated"),
        (["fidelity", *SIZES, *WORKLOAD, "--load", "1.5"], "--load must be a share"),
        (["fidelity", *SIZES, *WORKLOAD, "--repeats", "0"], "--repeats must be at least 1"),
        (["fidelity", *SIZES, *WORKLOAD, "--repetitions", "2"], "without --calibrate"),
        (["fidelity", *SIZES, *WORKLOAD, "cost_model.host_s_per_step=1", "--calibrate"],
         "nothing reads it"),
        (["fidelity", *SIZES, *WORKLOAD, "cost_model=fitted", "cost_model.path=none.json"],
         "none.json does not exist"),
        (["fidelity", *SIZES, *AT_ONCE, "--load", "0.5"], "all requests arrive at once"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_said_before_the_work(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_what_is_allowed_is_a_tenth_or_two_spreads():
    steady = Compared(name="x", real=(1.0, 1.0, 1.0), simulated=(1.09, 0.5, 1.09))
    assert (steady.error, steady.spread, steady.allowed) == (pytest.approx(0.09), 0.0, 0.1)
    assert steady.holds
    assert not Compared(name="x", real=(1.0,), simulated=(1.11,)).holds
    assert not Compared(name="x", real=(1.0,), simulated=(0.89,)).holds
    shaky = Compared(name="x", real=(0.8, 1.0, 1.2), simulated=(1.39,))
    assert shaky.spread == pytest.approx(0.2)
    assert shaky.holds
    assert not Compared(name="x", real=(0.8, 1.0, 1.2), simulated=(1.41,)).holds


def test_arrivals_are_spread_by_a_factor():
    listed = [
        Arrival(request_id=str(i), arrival_s=2.0 * i, prompt_token_ids=(1,)) for i in range(3)
    ]
    paced = Paced(Listed(listed), 0.25)
    assert paced.num_requests == 3
    times = []
    while (next_s := paced.next_s()) is not None:
        times.append((next_s, paced.take().arrival_s))
    assert times == [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)]
    assert last_arrival_s(Listed(listed)) == 4.0


def test_requests_that_wait_for_others_have_no_load():
    known = [KnownRequest(num_output_tokens=1, num_prompt_tokens=1)] * 3
    waiting = Conversations(known, starts=[0.0, 0.0], prompt=lambda number: (1,))
    with pytest.raises(ValueError, match="1 of 3 requests wait for others to end"):
        last_arrival_s(waiting)
