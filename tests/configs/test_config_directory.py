"""Configs of one's own, found by every command that composes settings."""

import sys

import pytest
from plan_builders import configured

from paxserve.cli import main

SERVED = ("executor=simulated", "model=llama-3-8b", "hardware=mine", "workload=synthetic",
          "workload/lengths=fixed", "workload.num_requests=2")  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    hardware = tmp_path / "my configs" / "hardware"
    hardware.mkdir(parents=True)
    known = configured("hardware=a100-80g", "model=llama-3-8b").hardware
    lines = [f"{name}: {getattr(known, name)}" for name in known.__dataclass_fields__
             if name not in ("name", "compile_target", "flop_per_s")]  # fmt: skip
    lines += ["name: Mine", "compile_target: null", "flop_per_s: {bfloat16: 312e12}"]
    (hardware / "mine.yaml").write_text("\n".join(lines))


@pytest.mark.parametrize("command", [
    ["plan", *SERVED[1:3]],
    ["run", *SERVED, "run_dir=r"],
    ["capacity", *SERVED, "workload/arrivals=poisson", "--slo", "p99_itl_ms=1000",
     "--tolerance", "0.5", "--highest", "2", "--out", "c"],
], ids=lambda command: command[0])  # fmt: skip
def test_a_directory_is_looked_at(command, capsys):
    code = main([*command, "--config-dir", "my configs"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "hydra" not in out
    if command[0] == "plan":
        assert "on Mine" in out


@pytest.mark.parametrize("command", ["calibrate", "fidelity", "verify"])
def test_commands_that_need_a_device_find_it_too(command, capsys):
    """The executor is refused, which is looked at after the hardware was found."""
    asked = [command, "executor=scripted", "hardware=mine"]
    asked += ["--out", "p.json"] if command == "calibrate" else []
    assert main(asked) == 2
    assert "Could not find 'hardware/mine'" in capsys.readouterr().err
    assert main([*asked, "--config-dir=my configs"]) == 2
    assert "scripted" in capsys.readouterr().err


def test_a_directory_that_is_not_there(capsys):
    assert main(["plan", *SERVED[1:3], "--config-dir", "nowhere"]) == 2
    assert "--config-dir nowhere is not a directory" in capsys.readouterr().err
