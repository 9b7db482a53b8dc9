"""The checks of kernels find what is wrong, and what a backend no longer can."""

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import unruly
from axes import ROOT

from kernels_pallas import checks, compile_targets, problems, support
from kernels_pallas.checks import Check, run_check
from kernels_pallas.compile_environment import COMPILE_ENVIRONMENT
from kernels_pallas.paged_attention import paged_attention, pallas_gpu, pallas_tpu, xla
from kernels_pallas.paged_attention.validation import check_batch
from kernels_pallas.problems import make_problem
from kernels_pallas.shapes import SHAPES
from kernels_pallas.tolerances import tolerance
from kernels_pallas.write_kv import write_kv
from kernels_pallas.write_kv import xla as write_xla
from paxserve import check_processes, cli

NUMERICS = Check(kind="numerics", backend="xla", subject="chunks", sizes={"dtype": "float32"})
WRITE = Check(
    kind="write",
    backend="xla",
    subject="rotated",
    sizes={"kv_dtype": "int8", "head_dim": 16, "block_size": 8},
)


@pytest.mark.parametrize("check", [NUMERICS, WRITE], ids=["numerics", "write"])
def test_a_right_kernel_passes(check):
    outcome = run_check(check)
    assert outcome.verdict == "ok"
    assert outcome.error <= outcome.bound


def test_the_bound_of_writes_is_the_table_s(monkeypatch):
    monkeypatch.setattr(checks, "WRITE_TOLERANCE", -1.0)
    outcome = run_check(WRITE)
    assert (outcome.verdict, outcome.bound) == ("FAILED", -1.0)


@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_a_compiler_that_is_not_installed_is_no_failed_kernel(monkeypatch, target):
    def missing(**options):
        raise RuntimeError("no such platform")

    def check():
        compile_targets.devices.cache_clear()
        backend = "pallas_gpu" if target == "h100" else "pallas_tpu"
        name = "llama-3-8b/decode_64x4k"
        return run_check(Check(kind="compile", backend=backend, subject=name, target=target))

    monkeypatch.setattr(compile_targets.topologies, "get_topology_desc", missing)
    monkeypatch.setattr(compile_targets, "find_spec", lambda module: None)
    outcome = check()
    assert outcome.verdict == "no compiler"
    assert outcome.summary.startswith(f"cannot compile for {target}: ")
    assert " is not installed; `make check-kernels` installs" in outcome.summary
    monkeypatch.setattr(compile_targets, "find_spec", lambda module: module)
    outcome = check()
    assert outcome.verdict == "FAILED", "it is there and does not start"
    assert "no such platform" in outcome.summary


def test_a_wrong_number_fails(monkeypatch):
    right = xla.paged_attention
    monkeypatch.setattr(
        xla, "paged_attention", lambda *args, **options: right(*args, **options) * 1.001
    )
    problems._attention.clear_cache()
    outcome = run_check(NUMERICS)
    assert (outcome.verdict, outcome.detail[:9]) == ("FAILED", "error 1.0")
    assert outcome.error == pytest.approx(1e-3, rel=0.05)
    assert outcome.bound == tolerance(jnp.float32)
    problems._attention.clear_cache()


@pytest.mark.parametrize("check", [NUMERICS, WRITE], ids=["numerics", "write"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [({"target": "here"}, "cpu"), ({"device_kind": "some chip"}, "some chip"), ({}, None)],
    ids=["here", "as some chip", "as any"],
)
def test_a_check_runs_with_the_tiles_of_its_device(monkeypatch, check, change, kind):
    """As an engine does there; measured ones are found by that name."""

    def spy(*args, device_kind, **options):
        raise RuntimeError(f"tiles of {device_kind}")

    monkeypatch.setattr(xla, "paged_attention", spy)
    monkeypatch.setattr(checks, "write_kv", spy)
    problems._attention.clear_cache()
    assert run_check(replace(check, **change)).detail == f"RuntimeError: tiles of {kind}"


def test_a_write_beside_its_slot_fails(monkeypatch):
    right = write_xla.write_kv
    monkeypatch.setattr(
        write_xla,
        "write_kv",
        lambda kv, k, v, slots, **options: right(kv, k, v, slots + 1, **options),
    )
    assert run_check(WRITE).verdict == "FAILED"


def test_what_goes_wrong_inside_a_check_is_told_not_raised(monkeypatch):
    outcome = run_check(replace(NUMERICS, subject="no such case"))
    assert (outcome.verdict, outcome.detail) == ("FAILED", "KeyError: 'no such case'")
    nested = "JaxRuntimeError: INTERNAL: Traceback:\n  File x\nRuntimeError: RACE DETECTED\n  write"
    assert replace(outcome, detail=nested).summary == "RuntimeError: RACE DETECTED"


@pytest.mark.parametrize(
    "check",
    [NUMERICS, Check(kind="compile", backend="xla", subject=next(iter(SHAPES)), target="v5e")],
    ids=["numerics", "compile"],
)
def test_what_a_backend_no_longer_can_fails(monkeypatch, check):
    def cannot(*args, **options):
        raise NotImplementedError("xla: not today")

    def trace(name, function, *arguments, donate_argnums):
        jax.eval_shape(function, *arguments)

    monkeypatch.setattr(xla, "paged_attention", cannot)
    monkeypatch.setattr(compile_targets, "compile_for", trace)  # no compiler is needed
    problems._attention.clear_cache()
    outcome = run_check(check)
    assert (outcome.verdict, outcome.detail) == ("FAILED", "NotImplementedError: xla: not today")
    problems._attention.clear_cache()


@pytest.mark.parametrize(
    ("subject", "copied", "verdict"),
    [("int8", 0, "ok"), ("int8", 1, "FAILED"), ("block32", 0, "ok"), ("block32", 1, "FAILED")],
)
def test_a_cache_that_is_copied_fails_its_scales_included(monkeypatch, subject, copied, verdict):
    subject = f"llama-3-8b/decode_64x4k/{subject}"
    kv, scales = (checks.abstract_arguments(SHAPES[subject], "pallas_tpu")[i] for i in (1, 6))
    cache_bytes = sum(x.size * x.dtype.itemsize for x in (kv, scales) if x is not None)
    memory = SimpleNamespace(alias_size_in_bytes=cache_bytes - copied, temp_size_in_bytes=0)
    compiled = SimpleNamespace(memory_analysis=lambda: memory)
    monkeypatch.setattr(compile_targets, "compile_for", lambda *args, **options: compiled)
    outcome = run_check(Check(kind="compile", backend="pallas_tpu", subject=subject, target="v5e"))
    assert outcome.verdict == verdict
    assert ("not written in place" in outcome.detail) == bool(copied)


def test_every_shape_meets_every_target_of_its_backend():
    found = {(c.subject, c.target) for c in checks.checks(quick=False) if c.kind == "compile"}
    assert found == {(s, t) for s in SHAPES for t in compile_targets.KERNEL_TARGETS}
    quick = {c.subject for c in checks.checks(quick=True) if c.kind == "compile"}
    assert quick == set(checks.QUICK_SHAPES) <= set(SHAPES)
    kinds = {(c.kind, c.backend) for c in checks.checks(quick=True)}
    assert kinds == {
        (kind, backend)
        for kind in ("numerics", "write", "compile")
        for backend in ("pallas_tpu", "pallas_gpu")
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_form_is_the_same_case(name):
    shape, small = SHAPES[name], SHAPES[name].small()
    assert small.num_heads // small.num_kv_heads == shape.num_heads // shape.num_kv_heads
    for same in ("head_dim", "block_size", "dtype", "kv_dtype"):
        assert getattr(small, same) == getattr(shape, same)
    assert (small.sliding_window is None) == (shape.sliding_window is None)
    assert {q == 1 for q in small.q_lens} == {q == 1 for q in shape.q_lens}
    pairs = [set(zip(s.q_lens, s.context_lens, strict=True)) for s in (shape, small)]
    longer, small_longer = ({c > q for q, c in rows} for rows in pairs)
    assert longer == small_longer
    assert small.num_tokens < 150
    assert max(small.context_lens) <= small.max_model_len


def test_the_work_of_a_shape():
    shape = SHAPES["llama-3-8b/decode_64x4k"]
    assert shape.kv_bytes == 64 * 4096 * 2 * 8 * 128 * 2
    assert shape.num_flops == 4 * 64 * 4096 * 32 * 128
    assert SHAPES["llama-3-8b/prompts_8x2k"].num_flops == 4 * 8 * (2048 * 2049 // 2) * 32 * 128
    windowed = SHAPES["mistral-7b/decode_1x128k"]
    assert windowed.kv_bytes == 4096 * 2 * 8 * 128 * 2
    int8 = SHAPES["llama-3-8b/decode_64x4k/int8/block128"]
    assert int8.kv_bytes == 64 * 4096 * 2 * 8 * (128 + 4)


def test_support_is_what_backends_say(monkeypatch):
    shape = support.CASES["bfloat16"]
    assert support.why_not("xla", None, shape) is None

    def cannot(*args, **options):
        raise NotImplementedError("xla: not today")

    monkeypatch.setattr(xla, "check_supported", cannot, raising=False)
    assert support.why_not("xla", None, shape) == "xla: not today"
    lines = support.table()
    assert lines[2].startswith("| bfloat16 | yes | no (1) | yes |")
    assert "1. xla: not today" in lines
    monkeypatch.setattr(write_xla, "check_supported", cannot, raising=False)
    monkeypatch.delattr(xla, "check_supported")
    assert support.why_not("xla", None, shape) == "xla: not today", "nor can it be written"


def test_the_whole_table_asks_without_tracing_a_kernel(monkeypatch):
    """So it takes no minute."""

    def traced(*args, **options):
        raise AssertionError("traced")

    for module in (xla, pallas_tpu, pallas_gpu, write_xla):
        for name in {"paged_attention", "write_kv"} & set(vars(module)):
            monkeypatch.setattr(module, name, traced)
    lines = support.table()
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(support.CASES)
    assert next(line for line in lines if line.startswith("| head_dim 80 ")).count("no (") == 5


TRACED = ("bfloat16", "float32", "head_dim 80", "block_size 8", "int8, block_size 16")


@pytest.mark.parametrize(
    "name", [n if n in TRACED else pytest.param(n, marks=pytest.mark.slow) for n in support.CASES]
)
@pytest.mark.parametrize(
    "column",
    [c for c in support.columns() if c.backend in checks.PALLAS and c.heading[-3:] in "v5e h100"],
    ids=lambda column: column.heading,
)
def test_a_kernel_refuses_what_its_backend_says_and_nothing_else(name, column):
    """The answer of `check_supported` is what tracing both kernels comes to."""
    shape = support.CASES[name]
    q, kv_blocks, *table, kv_scales = checks.abstract_arguments(shape, column.backend)
    tokens = jax.ShapeDtypeStruct((q.shape[0], shape.num_kv_heads, shape.head_dim), q.dtype)
    options = {"backend": column.backend, "device_kind": column.device_kind}

    def layer(kv_blocks, tokens, slots, q, table, kv_scales):
        kv = write_kv(kv_blocks, tokens, tokens, slots, kv_scales=kv_scales, **options)
        options_of_read = options | {"scale": 1.0, "sliding_window": shape.sliding_window}
        return paged_attention(q, kv[0], *table, kv_scales=kv[1], **options_of_read)

    slots = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
    try:
        jax.eval_shape(layer, kv_blocks, tokens, slots, q, table, kv_scales)
        refused = None
    except NotImplementedError as error:
        refused = str(error)
    assert refused == support.why_not(column.backend, column.device_kind, shape)


def test_targets_are_the_devices_that_their_compiler_knows():
    """How many, what they call themselves, and for how many cores a kernel's tiles are cut."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: `make check-kernels` installs it")
    program = """
from kernels_pallas.compile_targets import TARGETS, devices
for name, target in TARGETS.items():
    if target.platform == "tpu":
        found = devices(name)
        print(name, len(found), found[0].num_cores, found[0].device_kind)
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | COMPILE_ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"{name} {target.num_devices} {pallas_tpu.NUM_CORES[target.device_kind]} "
        f"{target.device_kind}"
        for name, target in compile_targets.TARGETS.items()
        if target.platform == "tpu"
    ]


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("platform", "kind", "name", "backend", "why"),
    [
        ("cpu", "cpu", "bfloat16", "xla", None),
        ("rocm", "some GPU", "bfloat16", "xla", None),
        ("tpu", "TPU v5 lite", "bfloat16", "pallas_tpu", None),
        ("tpu", "TPU v4", "head_dim 80", "xla", "head_dim must be 64 or a multiple of 128"),
        ("gpu", H100, "bfloat16", "pallas_gpu", None),
        ("gpu", H100, "float32", "xla", "needs bfloat16"),
        ("gpu", H100, "block_size 8", "xla", "needs block_size"),
        ("gpu", A100, "bfloat16", "xla", f"needs a Hopper GPU (wgmma), got {A100}"),
    ],
)
def test_auto_takes_the_platforms_kernel_where_it_can_run(platform, kind, name, backend, why):
    choice = support.choose(platform, kind, support.CASES[name])
    assert choice.backend == backend
    assert choice.why is None if why is None else why in choice.why


def test_problems_are_consistent():
    """What the kernels are tested with is itself a batch that the host's check accepts."""
    for table in ("permuted", "consecutive", "shared"):
        problem = make_problem((1, 3, 2), (40, 35, 70), block_size=16, table=table)
        check_batch(
            block_table=problem.block_table,
            context_lens=problem.context_lens,
            cu_q_lens=problem.cu_q_lens,
            num_rows=problem.num_rows,
            num_tokens=len(problem.q),
            num_blocks=problem.num_blocks,
            block_size=16,
        )
        num_alike = (problem.block_table[0] == problem.block_table[1]).tolist().index(False)
        assert num_alike == (2 if table == "shared" else 0)
        used = np_used(problem)
        if table == "consecutive":
            assert used == sorted(used)
        kv = problem.kv_blocks("reference")
        assert bool(jnp.isnan(kv[0]).all())
        assert int(jnp.isfinite(kv[:, 0, 0, :, 0]).sum()) == len(
            {slot for row in range(3) for slot in problem.slots(row).tolist()}
        )


def np_used(problem):
    return [int(b) for row in problem.block_table for b in row if b]


def test_the_command_runs_and_writes_what_it_found(tmp_path):
    """On a write per backend: no compiler is needed."""
    file = tmp_path / "checks.json"
    command = [sys.executable, "-m", "paxserve", "check-kernels", "--quick", "--jobs", "1"]
    done = subprocess.run(
        [*command, "--only", "write*float8*", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ok, 0 failed" in done.stdout
    found = json.loads(file.read_text("utf-8"))
    assert {(f["check"]["backend"], f["verdict"]) for f in found} == {
        ("pallas_tpu", "ok"),
        ("pallas_gpu", "ok"),
    }


def test_a_process_takes_several_checks_and_is_made_anew(monkeypatch):
    monkeypatch.setattr(check_processes, "CHECKS_PER_PROCESS", 2)
    found = list(check_processes.run(["one", "two", "three"], num_jobs=1, act=unruly.act))
    assert [outcome.check for outcome in found] == ["one", "two", "three"]
    first, second, third = (outcome.detail for outcome in found)
    assert first == second != third


def test_a_check_that_hangs_or_dies_fails_and_the_others_go_on():
    chosen = ["hangs", "dies", "one", "dies", "two"]
    found = list(check_processes.run(chosen, num_jobs=2, deadline_s=10.0, act=unruly.act))
    assert sorted(outcome.check for outcome in found) == sorted(chosen)
    assert {(o.check, o.verdict, o.detail) for o in found if o.verdict != "ok"} == {
        ("hangs", "FAILED", "timed out after 10 s"),
        ("dies", "FAILED", "its process died"),
    }
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nonsense"], "no check matches --only 'nonsense'"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--support", "--quick", "--json", "x"], "--support does not read --quick, --json"),
        (["--support", "--only", "x", "--jobs", "2"], "--support does not read --only, --jobs"),
        (["--step", "--quick"], "--step does not read --quick"),
        (["--step", "--jobs", "2"], "--step does not read --jobs"),
        (["--step", "--support"], "--support: not allowed with argument --step"),
    ],
)
def test_the_command_refuses_what_it_does_not_read(options, message, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    try:
        status = cli.main(["check-kernels", *options])
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_the_command_names_what_it_checked(monkeypatch, capsys):
    """By name and value, and one process per core where their number is not known."""
    other = replace(NUMERICS, sizes={"dtype": "float32", "num_heads": 8}, device_kind="some chip")
    asked = []

    def run(chosen, *, num_jobs):
        asked.append(num_jobs)
        for check in chosen:
            yield checks.Outcome(check=check, verdict="ok", seconds=1.0, detail="")

    monkeypatch.setattr(checks, "checks", lambda *, quick: [NUMERICS, other])
    monkeypatch.setattr(check_processes, "run", run)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"COLUMNS": "120"})
    assert cli.main(["check-kernels"]) == 0
    printed = capsys.readouterr().out
    assert "chunks dtype=float32 num_heads=8 as some chip" in printed
    assert "2 ok, 0 failed" in printed
    assert asked == [1]


def test_the_command_shows_errors_beside_bounds_and_missing_compilers(
    monkeypatch, capsys, tmp_path
):
    far = replace(NUMERICS, subject="peaky")
    unknown = Check(kind="compile", backend="pallas_gpu", subject="some shape", target="h100")

    def outcome(check, verdict, detail, error=None, bound=None):
        return checks.Outcome(
            check=check, verdict=verdict, seconds=1.0, detail=detail, error=error, bound=bound
        )

    outcomes = [
        outcome(NUMERICS, "ok", "error 1.0e-06 of 1.0e-05", 1e-6, 1e-5),
        outcome(far, "FAILED", "error 2.0e-05 of 1.0e-05", 2e-5, 1e-5),
        outcome(unknown, "no compiler", "cannot compile for h100: x"),
    ]
    monkeypatch.setattr(checks, "checks", lambda *, quick: [o.check for o in outcomes])
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"COLUMNS": "120"})

    def printed(*given):
        monkeypatch.setattr(check_processes, "run", lambda *args, **options: iter(given))
        status = cli.main(["check-kernels", "--json", str(tmp_path / "found.json")])
        return status, " ".join(capsys.readouterr().out.split())

    status, text = printed(*outcomes)
    assert status == 1
    assert "chunks dtype=float32 1.0e-06 of 1e-05" in text
    assert "peaky dtype=float32 FAILED 2.0e-05 of 1e-05" in text
    assert "some shape no compiler" in text
    assert "worst of numerics xla: error 2.0e-05 of 1.0e-05 (200%), peaky dtype=float32" in text
    assert "1 ok, 1 failed, 1 without a compiler" in text
    assert "cannot compile for h100: x" in text
    assert "pip install --no-deps --target .venv/.compilers" in text
    status, text = printed(outcomes[0], outcomes[2])
    assert status == 1, "nothing is known of a shape that was not compiled"
    assert printed(outcomes[0])[0] == 0
    status, text = printed(outcome(far, "FAILED", "error inf of 1.0e-05", float("inf"), 1e-5))
    assert (status, "FAILED inf of 1e-05" in text) == (1, True)
    (found,) = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert (found["error"], found["bound"], found["detail"]) == (None, 1e-5, "error inf of 1.0e-05")
