"""The step that is compiled for absent devices is the engine's, its bytes are worked by hand, and
what does not fit is refused with every number.

The accelerators' compilers run in a process of their own, whose environment tells JAX so before it
starts.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import pytest
from axes import ROOT
from real_builders import loaded, make_real

from kernels_pallas.compile_environment import COMPILE_ENVIRONMENT
from kernels_pallas.compile_targets import TARGETS
from paxserve import cli
from paxserve.device import whole_step
from paxserve.device.kv_blocks import Kernel
from paxserve.device.whole_step import (
    DoesNotFit,
    NamedCase,
    StepCase,
    StepMemory,
    StepRow,
    abstract_step,
    check_fits,
    check_step,
    fault,
    named_cases,
)
from paxserve.models.llama3 import LLAMA_3_70B
from paxserve.pack import Variant

CASES = {(name, target): case for name, target, case, _ in named_cases()}
TOO_LARGE = ("llama-3-70b/decode_64x4k", "v6e")


def test_the_cases_are_those_of_the_claim():
    assert {(name.split("/")[0], target, case.tensor_parallel_size)
            for (name, target), case in CASES.items()} == {
        ("llama-3-8b", "v5p", 1), ("llama-3-8b", "h100", 1), ("llama-3-70b", "v5p", 4),
        ("llama-3-70b", "v5p-8", 8), ("llama-3-70b", "v6e-8", 8), ("llama-3-70b", "v6e", 4),
    }  # fmt: skip
    for (_, target), case in CASES.items():
        assert case.tensor_parallel_size in (1, TARGETS[target].num_devices)


# 70,553,706,496 weights, of which 161 norms of 8192 are on every device.
WEIGHT_BYTES = 2 * ((70_553_706_496 - 161 * 8192) // 4 + 161 * 8192)
# 64 rows of 256 blocks and the null block, 80 layers, K and V of 2 of the 8 heads.
KV_BYTES = (1 + 64 * 256) * 16 * 80 * 2 * 2 * 128 * 2


def test_70b_on_four_v6e_is_refused_with_the_numbers():
    """No compiler is asked: this holds without libtpu."""
    row = check_step(*TOO_LARGE, CASES[TOO_LARGE], backend="xla")
    assert (row.weight_bytes, row.kv_bytes) == (WEIGHT_BYTES, KV_BYTES)
    assert row.hbm_bytes == 32 * 2**30 < WEIGHT_BYTES
    assert (row.memory, row.seconds) == (None, None)
    assert row.refusal == (
        "the step does not fit on v6e x 4: each device has 32.00 GiB and needs 52.86 GiB: "
        f"hbm_bytes=34359738368, weight_bytes={WEIGHT_BYTES}, kv_bytes={KV_BYTES}, with "
        "num_rows=64, context_len=4096, num_blocks=16385: take more devices, fewer rows, a shorter "
        "context or kv_cache_dtype=int8"
    )


@pytest.mark.parametrize(
    "named", list(named_cases()), ids=lambda case: f"{case.name} on {case.target}"
)
def test_a_case_fits_by_its_arithmetic_where_it_must(named):
    assert named.must_fit == (named.target != "v6e")
    if named.must_fit:
        check_fits(named.target, named.case, backend="xla")
    else:
        with pytest.raises(DoesNotFit, match=r"needs 5[23]\.\d\d GiB"):
            check_fits(named.target, named.case, backend="xla")


FITS = StepRow(
    name="step", target="v5p", num_devices=1, hbm_bytes=100, weight_bytes=1, kv_bytes=1,
    step_bytes=50, seconds=1.0, memory=StepMemory(2, 1, 1, 50), refusal=None,
)  # fmt: skip
REFUSED = FITS._replace(memory=None, refusal="the step does not fit")
GREEDY = FITS._replace(memory=StepMemory(2, 1, 1, 51))


@pytest.mark.parametrize(
    ("row", "must_fit", "found"),
    [
        (FITS, True, None),
        (REFUSED, False, None),
        (REFUSED, True, "it must fit: the step does not fit"),
        (FITS, False, "it must be refused, and fits"),
        (GREEDY, True, "temp_bytes=51, more than step_bytes=50"),
    ],
    ids=["fits", "refused", "refused but must fit", "fits but must not", "temporary"],
)
def test_what_is_wrong_with_a_step(row, must_fit, found, monkeypatch, capsys, tmp_path):
    """And `paxserve check-kernels --step` ends with 1 and says so."""
    wrong = fault(row, must_fit=must_fit)
    assert wrong is None if found is None else found in wrong
    named = NamedCase("step", "v5p", CASES["llama-3-8b/decode_64x4k", "v5p"], must_fit)
    monkeypatch.setattr(whole_step, "named_cases", lambda: iter([named]))
    monkeypatch.setattr(whole_step, "check_step", lambda *args, **options: row)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = tmp_path / "steps.json"
    assert cli.main(["check-kernels", "--step", "--json", str(file)]) == (found is not None)
    assert ("FAILED step on v5p" in capsys.readouterr().err) == (found is not None)
    (written,) = json.loads(file.read_text("utf-8"))
    assert written["fault"] == wrong


def test_the_compiler_s_numbers_are_compared_too():
    case = CASES["llama-3-70b/decode_64x4k", "v6e-8"]
    fits = StepMemory(argument_bytes=30, output_bytes=9, alias_bytes=8, temp_bytes=1)
    assert fits.total_bytes == 32
    full = StepMemory(*[2**30 * n for n in fits])
    check_fits("v6e-8", case, backend="xla", memory=full)
    message = r"needs 32.00 GiB: .*argument_bytes=\d+, .*alias_bytes=\d+, temp_bytes=1073741825"
    with pytest.raises(DoesNotFit, match=message):
        check_fits("v6e-8", case, backend="xla", memory=full._replace(temp_bytes=2**30 + 1))


def test_an_eight_bit_cache_takes_half_and_its_scales():
    case = replace(CASES[TOO_LARGE], kv_cache_dtype="int8")
    assert case.layout("reference").bytes_per_block == 16 * 80 * 2 * 2 * (128 + 4)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size=16 must divide num_kv_heads=8"):
        StepCase(config=LLAMA_3_70B, num_tokens=8, num_rows=8, tensor_parallel_size=16)


@pytest.mark.parametrize("size", [1, 2])
def test_the_step_is_the_program_that_the_engine_runs(size):
    """Text for text, as it goes to the compiler."""
    real = make_real(loaded("tiny"), tensor_parallel_size=size)
    case = StepCase(
        config=loaded("tiny").config,
        num_tokens=16,
        num_rows=4,
        context_len=96,
        max_model_len=96,
        dtype="float32",
        tensor_parallel_size=size,
    )
    kernel = Kernel("xla", jax.devices()[0].device_kind)
    forward, arguments = abstract_step(case, jax.devices()[:size], kernel=kernel)
    found = forward.lower(*arguments, variant=Variant.SAMPLED)
    packed = real._packer.padding(real.buckets.shapes[1], Variant.SAMPLED)
    own_arguments = (
        real._parameters,
        real._state,
        jax.device_put(packed.arrays, real._everywhere),
    )
    if size == 1:  # said to lie on the device on which they do lie
        own_arguments = jax.device_put(own_arguments, jax.devices()[0])
    own = real._forward.lower(*own_arguments, variant=Variant.SAMPLED)
    assert found.as_text() == own.as_text()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny", "tied"])
def test_a_float32_step_rounds_no_operand_on_an_accelerator(platform, dtype, model):
    """By default a TPU multiplies float32 as bfloat16, and a GPU as TF32."""
    config = replace(loaded("tiny").config, tie_embeddings=model == "tied")
    case = StepCase(
        config=config, num_tokens=16, num_rows=4, context_len=96, max_model_len=96, dtype=dtype
    )
    forward, arguments = abstract_step(case, jax.devices()[:1], kernel=Kernel("xla", None))
    traced = forward.trace(*arguments, variant=Variant.SAMPLED)
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    dots = [line for line in lines if "dot_general" in line]
    assert len(dots) > 7 * config.num_layers
    rounded = [dot for dot in dots if "precision = [HIGHEST, HIGHEST]" not in dot]
    assert [dot for dot in rounded if "f32>, tensor" in dot.split(" : ")[1]] == []
    assert bool(rounded) == (dtype == "bfloat16")


# With the compilers.

PROGRAM = """
import json, sys
from dataclasses import replace
from kernels_pallas.compile_targets import TARGETS
from paxserve.device.whole_step import StepCase, check_step
from paxserve.models.llama3 import LLAMA_3_70B

config = replace(LLAMA_3_70B, num_layers=2, layer_windows=())
case = StepCase(config=config, num_tokens=64, num_rows=64, tensor_parallel_size=8)
rows = [check_step("fits", "v6e-8", case, backend="xla")]
left = TARGETS["v6e-8"].hbm_bytes - case.weight_bytes
num_blocks = left // case.layout("xla").bytes_per_block - 2
full = replace(case, context_len=num_blocks // 64 * 16)
rows.append(check_step("full", "v6e-8", full, backend="xla"))
print(json.dumps([row._replace(memory=row.memory and row.memory._asdict())._asdict()
                  for row in rows]))
"""


@pytest.mark.slow
def test_two_layers_of_70b_compile_for_eight_v6e_and_the_compiler_refuses_a_pool_too_large():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: `make check-kernels` installs it")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | COMPILE_ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fits, full = json.loads(done.stdout.splitlines()[-1])
    memory = fits["memory"]
    assert fits["refusal"] is None
    assert memory["alias_bytes"] >= fits["kv_bytes"]
    assert 0 <= memory["argument_bytes"] - fits["weight_bytes"] - fits["kv_bytes"] < 2**24
    assert 0 < memory["temp_bytes"] < fits["step_bytes"]
    assert full["weight_bytes"] + full["kv_bytes"] < full["hbm_bytes"]
    assert "does not fit on v6e-8 x 8, says the compiler" in full["refusal"]
