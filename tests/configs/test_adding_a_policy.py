"""A new policy is one Python file and one YAML, or a class named on the command line.

A copy of the package and its configs gets a new file and YAML per axis, made from one that is
there, and runs in a process of its own; nothing else of the copy is touched.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from axes import POLICY_AXES, ROOT, policy_class

from paxserve.cli import main

AXES = (*POLICY_AXES, "workload")
# What each new policy is made from, and what a run must choose beside it.
MODELS = {
    "admission": "sjf",
    "gate": "watermark",
    "batching": "textbook",
    "reservation": "on_demand",
    "placement": "first_fit",
    "prefix_cache": "radix",
    "eviction": "lfu",
    "victim": "newest",
    "preemption": "cheapest",
    "workload": "jsonl",
}
BESIDE = {
    "eviction": ["prefix_cache=radix"],
    "preemption": ["limits.num_host_blocks_override=8"],
}
SETTINGS = {"workload": ["workload.path=requests.jsonl"]}
SIZES = ["executor=scripted", "limits.max_model_len=32", "limits.num_blocks_override=9",
         "limits.max_num_seqs=4", "limits.max_num_batched_tokens=32"]  # fmt: skip
WORKLOAD = ["workload=jsonl", "workload.path=requests.jsonl"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    (tmp_path / "requests.jsonl").write_text('{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


def renamed(axis: str) -> str:
    """The source of a policy with its class called Newcomer."""
    source = (ROOT / "paxserve" / axis / f"{MODELS[axis]}.py").read_text(encoding="utf-8")
    own = policy_class(axis, MODELS[axis]).__name__
    return re.sub(rf"\b{own}\b", "Newcomer", source)


def overrides(axis: str, name: str, run_dir: str) -> list[str]:
    chosen = f"{axis}=[{name}]" if axis == "gate" and ":" not in name else f"{axis}={name}"
    workload = [] if axis == "workload" else WORKLOAD
    return ["run", *SIZES, *workload, chosen, *BESIDE.get(axis, []), *SETTINGS.get(axis, []),
            f"run_dir={run_dir}"]  # fmt: skip


def used_classes(run_dir: Path) -> set[str]:
    applied = json.loads((run_dir / "engine.json").read_text())["policies"]
    found = [*applied.pop("gates"), *applied.values()]
    return {policy["class"] for policy in found}


@pytest.mark.parametrize("axis", AXES)
def test_a_class_named_on_the_command_line(axis, workplace, monkeypatch, capsys):
    (workplace / f"my_{axis}.py").write_text(renamed(axis))
    monkeypatch.setattr(sys, "path", [str(workplace), *sys.path])
    name = f"my_{axis}:Newcomer"
    code = main(overrides(axis, name, "mine"))
    assert code == 0, capsys.readouterr().err
    assert len((workplace / "mine" / "arrivals.jsonl").read_text().splitlines()) == 1
    if axis != "workload":
        assert name in used_classes(workplace / "mine")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package and its configs, with a newcomer in every axis."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("paxserve", "kernels_pallas", "configs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for axis in AXES:
        (root / "paxserve" / axis / "newcomer.py").write_text(renamed(axis))
        yaml = (root / "configs" / axis / f"{MODELS[axis]}.yaml").read_text()
        yaml = yaml.replace(f"gate.{MODELS['gate']}", "gate.newcomer")
        (root / "configs" / axis / "newcomer.yaml").write_text(yaml)
    return root


RUN_ALL = """
import json, sys
from paxserve.cli import main
for arguments in json.load(open("runs.json")):
    sys.argv = ["paxserve"]
    code = main(arguments)
    assert code == 0, (arguments, code)
"""


def test_a_file_and_its_yaml_in_every_axis(copy, workplace):
    """All in one process, since starting Python is what costs."""
    runs = [overrides(axis, "newcomer", axis) for axis in AXES]
    (workplace / "runs.json").write_text(json.dumps([*runs, ["pairs", "--all"]]))
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(copy)},
    )
    assert done.returncode == 0, done.stderr
    for axis in POLICY_AXES:
        assert f"paxserve.{axis}.newcomer:Newcomer" in used_classes(workplace / axis)
    assert (workplace / "workload" / "complete").exists()
    # The table of pairs judges them too, without being told of them.
    assert "placement=newcomer prefix_cache=newcomer: prefix_cache Newcomer shares" in done.stdout
    assert "admission=newcomer batching=newcomer: together" in done.stdout
