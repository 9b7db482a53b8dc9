"""The bars of a Hopper GPU are read from what was measured, and from nothing else."""

import math

import pytest

from experiments import device_bars

H200 = "NVIDIA H200"
DECODE, PROMPTS = "llama-3-8b/decode_64x4k", "llama-3-8b/prompts_8x2k"


def row(shape, seconds, *, block_size=16, backend="pallas_gpu", **changes):
    return {
        "shape": shape,
        "is_small": False,
        "problem": {"block_size": block_size},
        "num_bytes": 100,
        "num_flops": 1000,
        "backend": backend,
        "timing": None if seconds is None else {"median_s": seconds},
        "note": "",
        **changes,
    }


def found(*rows, kind=H200, over=1.3, **changes):
    """By default 70 % of the copy bandwidth, blocks of 16 at 5 %, 30 % of the matmul rate."""
    rows = rows or (
        row(DECODE, 0.01, backend="xla"),
        row(DECODE, 1 / 0.7),
        row(DECODE, 1 / 0.7 / 1.05, block_size=4096),
        row(DECODE, 9.0, block_size=128),
        row(PROMPTS, 1 / 0.3),
    )
    ceilings = {"copy_bytes_per_s": 100.0, "matmul_flops_per_s": 1000.0}
    step = {"model": "llama-3-8b", "backend": "pallas_gpu", "device_over_floor": over}
    bench = {"ceilings": ceilings, "rows": list(rows)}
    return {"device_kind": kind, "bench": bench, "step": step, **changes}


def test_what_was_measured_holds():
    verdicts = device_bars.verdicts(found())
    assert [v.measured for v in verdicts] == pytest.approx([0.70, 1.05, 0.30, 1.3])
    assert [(v.must, v.goal) for v in verdicts] == [
        (">= 0.6", ">= 0.85"), ("<= 1.1", "-"), (">= 0.25", ">= 0.5"), ("<= 1.4", "<= 1.25"),
    ]  # fmt: skip
    assert [v.text for v in verdicts] == ["holds"] * 4
    assert device_bars.faults(verdicts) == []
    lines = device_bars.table(verdicts)
    assert lines[0].split() == ["bar", "|", "must", "|", "goal", "|", "measured", "|"]
    cells = [cell.strip() for cell in lines[1].split("|")]
    assert cells[1:] == [">= 0.6", ">= 0.85", "0.700", "holds"]
    assert len(lines) == 5


def test_a_goal_that_is_reached_is_said():
    rows = row(DECODE, 1 / 0.85), row(DECODE, 1.0, block_size=4096), row(PROMPTS, 1 / 0.5)
    verdicts = device_bars.verdicts(found(*rows, over=1.25))
    assert [v.text for v in verdicts] == ["holds, and the goal", "DOES NOT HOLD"] + [
        "holds, and the goal"
    ] * 2


@pytest.mark.parametrize("over", [1.41, math.nan])
def test_what_does_not_hold_is_a_fault(over):
    rows = row(DECODE, 1 / 0.59), row(DECODE, 1 / 0.59 / 1.11, block_size=4096), row(PROMPTS, 4.1)
    verdicts = device_bars.verdicts(found(*rows, over=over))
    assert [v.text for v in verdicts] == ["DOES NOT HOLD"] * 4
    assert device_bars.faults(verdicts)[0] == (
        "decode 64 x 4k, bfloat16, Llama-3-8B heads, of the copy bandwidth: 0.59, must be >= 0.6"
    )
    assert len(device_bars.faults(verdicts)) == 4


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (found(kind="cpu"), "it is of a Hopper GPU, this is cpu"),
        (found(kind="NVIDIA A100-SXM4-80GB"), "it is of a Hopper GPU, this is NVIDIA A100"),
        (found(bench="RuntimeError: no luck", step="not run: out of time"), "RuntimeError: no"),
        ({"device_kind": H200}, "the part bench did not run"),
        (found(row(DECODE, 1.0, backend="xla"), step="x"), "no row of pallas_gpu on llama-3-8b"),
        (found(row(DECODE, None, note="out of time"), step="x"), "out of time"),
        (found(row(DECODE, 1.0, is_small=True), step="x"), "the small form was run"),
    ],
)
def test_what_was_not_measured_says_why_and_how(given, why):
    verdicts = device_bars.verdicts(given)
    assert [(v.measured, v.holds) for v in verdicts] == [(None, None)] * 4
    assert verdicts[0].text.startswith(f"not measured: {why}")
    assert device_bars.faults(verdicts) == []
    assert device_bars.table(verdicts)[-1] == f"on a Hopper GPU: {device_bars.COMMAND}"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"model": "tiny"}, "the step was that of tiny"), ({"backend": "xla"}, "ran with xla")],
)
def test_the_step_of_another_model_or_kernel_is_not_measured(change, why):
    given = found()
    given["step"] |= change
    assert why in device_bars.verdicts(given)[3].text
