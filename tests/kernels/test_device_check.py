"""The script for a device says what is wrong with what it found, and ends with 1."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments import device_check
from experiments.device_check import Part
from kernels_pallas import problems, support
from kernels_pallas.bench_rows import Ceilings, Row
from kernels_pallas.checks import Check
from kernels_pallas.paged_attention import xla
from kernels_pallas.shapes import SHAPES
from kernels_pallas.timing import Timing

NUMERICS = Check(kind="numerics", backend="xla", subject="one_row", sizes={"dtype": "float32"})
SHAPE = "llama-3-8b/decode_64x4k"
MEASURED = Row(
    shape=SHAPE,
    is_small=False,
    problem=SHAPES[SHAPE],
    kernel="k",
    backend="pallas_gpu",
    timing=Timing(1.0, 1.0, 1.0, 1, 1),
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run(part)` -> exit status and what was written."""
    monkeypatch.setattr(device_check, "interpreted_checks", lambda *args, **options: [NUMERICS])
    monkeypatch.setattr(device_check, "measure_ceilings", lambda: Ceilings(1e9, 1.0, "float32"))
    monkeypatch.setattr(device_check.bench, "bench", lambda *args, **options: [MEASURED])

    def run(*parts):
        file = tmp_path / "device.json"
        status = device_check.main([*parts, "--json", str(file)])
        return status, json.loads(file.read_text("utf-8"))

    return run


def test_what_is_right_passes(run, capsys):
    status, found = run("numerics", "bench")
    assert (status, found["failed"]) == (0, [])
    assert found["numerics"][0]["verdict"] == "ok"
    assert found["bench"]["rows"][0]["timing"]["median_s"] == 1.0
    printed = capsys.readouterr().out
    assert "failed: none" in printed
    name = "numerics xla one_row dtype=float32 on here"
    assert found["numerics"][0]["check"] == name, "as it was run, not as it is simulated"
    assert {bar["why"] for bar in found["bars"]} == {"it is of a Hopper GPU, this is cpu"}
    assert printed.count("not measured: it is of a Hopper GPU, this is cpu") == 4


def test_a_bar_that_does_not_hold_fails(run, monkeypatch):
    """Of made-up seconds, on a device that calls itself an H200."""
    monkeypatch.setattr(device_check.device_bars, "is_hopper", lambda kind: True)
    status, found = run("bench")
    assert status == 0
    assert [bar["holds"] for bar in found["bars"]] == [True, None, None, None]
    monkeypatch.setattr(device_check, "measure_ceilings", lambda: Ceilings(1e12, 1.0, "float32"))
    status, found = run("bench")
    assert status == 1
    (fault,) = found["failed"]
    assert fault.endswith("of the copy bandwidth: 0.00107, must be >= 0.6")


def test_a_wrong_number_fails(run, monkeypatch, capsys):
    right = xla.paged_attention
    monkeypatch.setattr(
        xla, "paged_attention", lambda *args, **options: right(*args, **options) * 1.001
    )
    problems._attention.clear_cache()
    status, found = run("numerics", "bench")
    problems._attention.clear_cache()
    assert status == 1
    (fault,) = found["failed"]
    assert fault.startswith("numerics: numerics xla one_row dtype=float32 on here: error 1.0e-03")
    assert fault in capsys.readouterr().out
    assert found["bench"], "the other parts go on"


def test_that_no_check_was_passed_fails(run, monkeypatch):
    monkeypatch.setitem(device_check.SHARES_S, "numerics", -1.0)
    assert run("numerics")[1]["failed"] == ["numerics: no check was passed"]


def test_a_kernel_that_raises_in_the_bench_fails(run, monkeypatch):
    raised = replace(MEASURED, timing=None, note="ValueError: no", has_failed=True)
    monkeypatch.setattr(device_check.bench, "bench", lambda *args, **options: [MEASURED, raised])
    assert run("bench")[1]["failed"] == [f"bench: {SHAPE} k: ValueError: no"]
    monkeypatch.setattr(
        device_check.bench, "bench", lambda *args, **options: [replace(MEASURED, timing=None)]
    )
    assert run("bench")[1]["failed"] == ["bench: nothing was measured"]


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_logits_beyond_the_table_fail(wrong):
    rows = [
        {"id": "a", "kernel_against_xla": 0.0, "xla_against_float32": 9.0},
        {"id": "b", "kernel_against_xla": wrong, "xla_against_float32": 0.0},
    ]
    (fault,) = device_check._logit_faults(rows, "bfloat16")
    assert fault.startswith("logits after b: error ")
    assert list(device_check._logit_faults(rows[:1], "float32")) == []


def test_a_part_that_raises_fails_and_the_others_go_on(tmp_path):
    def broken():
        raise RuntimeError("no such luck")

    found, file = {}, tmp_path / "device.json"
    parts = {"numerics": broken, "bench": lambda: Part([1], ["too slow"])}
    assert device_check.run_parts(parts, found, file) == [
        "numerics: RuntimeError: no such luck",
        "bench: too slow",
    ]
    assert json.loads(file.read_text("utf-8")) == found
    assert found["bench"] == [1]


def test_a_part_that_is_skipped_is_written_too(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "TOTAL_S", 0.0)
    file = tmp_path / "device.json"
    assert device_check.run_parts({"chat": lambda: Part([1])}, {}, file) == []
    assert json.loads(file.read_text("utf-8"))["chat"] == "not run: out of time"


def test_the_path_is_looked_at_before_anything_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--json .*/nowhere/device.json cannot be written"):
        device_check.main(["--json", str(tmp_path / "nowhere" / "device.json")])


def test_the_backend_is_what_auto_chooses(run, monkeypatch, capsys):
    """Not the platform's own where that cannot run."""
    chosen = support.Choice("reference", "some reason")
    monkeypatch.setattr(device_check.bench, "choose", lambda *args: chosen)
    run("bench")
    assert ", backend reference" in capsys.readouterr().out
