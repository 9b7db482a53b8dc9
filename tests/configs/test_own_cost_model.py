"""A cost model of one's own: named on the command line in every command that costs steps, or given
as an object.
"""

import json
import sys
from dataclasses import dataclass

import pytest

import paxserve
from paxserve.cli import main
from paxserve.cost_model import Costs

MINE = """
from dataclasses import dataclass

from paxserve.cost_model import Costs


@dataclass(frozen=True)
class MyModel:
    step_s: float = 0.5

    def open(self, target):
        return Costs(("mine",), lambda shape: (self.step_s,))
"""
SIMULATED = ("model=llama-3-8b", "hardware=a100-80g", "cost_model=my_costs:MyModel")
SERVED = ("executor=simulated", "workload=synthetic", "workload/lengths=fixed",
          "workload.lengths.output_tokens=3", "workload.num_requests=4")  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    (tmp_path / "my_costs.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_costs", None)
    return tmp_path


def test_a_run_takes_it(capsys):
    code = main(["run", *SIMULATED, *SERVED, "cost_model.step_s=0.25", "run_dir=r"])
    assert code == 0, capsys.readouterr().err
    assert paxserve.Result.read("r").steps["duration_s"].unique().tolist() == [0.25]


def test_a_plan_takes_it(capsys):
    assert main(["plan", *SIMULATED, "--tpot-ms", "600", "--json", "plan.json"]) == 0
    with open("plan.json", encoding="utf-8") as file:
        plan = json.load(file)
    assert plan["cost_model"] == {"class": "MyModel", "step_s": 0.5}
    assert {batch["step_s"] for batch in plan["batches"]} == {0.5}
    assert "steps by mymodel: step_s=0.5" in capsys.readouterr().out


def test_a_capacity_search_takes_it(capsys):
    asked = ("workload/arrivals=poisson", "--slo", "mean_ttft_ms=700", "--tolerance", "0.5")
    code = main(["capacity", *SIMULATED, *SERVED, *asked, "--out", "c"])
    assert code == 0, capsys.readouterr().err
    with open("c/capacity.json", encoding="utf-8") as file:
        probes = json.load(file)["probes"]
    assert min(probe["mean_ttft_ms"] for probe in probes) >= 500


@dataclass(frozen=True)
class TwoSeconds:
    def open(self, target):
        return Costs(("two",), lambda shape: (2.0,))


def test_an_object_takes_the_place_of_the_choice():
    result = paxserve.run([*SIMULATED[:2], *SERVED], policies={"cost_model": TwoSeconds()})
    assert result.steps["duration_s"].unique().tolist() == [2.0]
    assert "cost_model: TwoSeconds()" in (result.path / "config.yaml").read_text()


def test_it_is_refused_where_nothing_is_simulated():
    with pytest.raises(ValueError, match="cost_model was given, but executor=scripted reads none"):
        paxserve.run(["executor=scripted"], policies={"cost_model": TwoSeconds()})
    with pytest.raises(ValueError, match="cost_model must be an object of a dataclass"):
        paxserve.run([*SIMULATED[:2], *SERVED], policies={"cost_model": TwoSeconds})
    with pytest.raises(ValueError, match=r"cost_model.step_s was set, but nothing reads it"):
        paxserve.run([*SIMULATED, *SERVED, "cost_model.step_s=1"],
                     policies={"cost_model": TwoSeconds()})  # fmt: skip
