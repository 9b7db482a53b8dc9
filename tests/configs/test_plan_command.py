"""`paxserve plan` at the command line: what it says, what it refuses, and its JSON."""

import importlib.util
import json
import math
from dataclasses import asdict, fields

import pytest
from plan_builders import configured

from paxserve.cli import main
from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions
from paxserve.plan import Demand, compiled
from paxserve.plan.plan import Plan, make_plan
from paxserve.sizing import step_bytes

LLAMA = ("model=llama-3-70b", "hardware=h100")


@pytest.fixture
def plan(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments):
        code = main(["plan", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_it_says_what_there_is_to_say(plan):
    code, out, _ = plan(*LLAMA, "tp=4")
    assert code == 0
    for words in (
        "llama-3-70b, 70.55 x 10^9 weights in bfloat16, on 4 x H100 SXM",
        "KV in bfloat16: 327,680 bytes a token, 4,096 of them in each layer; each device has 1/4",
        "largest step (512 tokens, 32 rows; the engine's estimate)",
        "16,384 blocks of 16 = 262,144 tokens",
        "0.9 x (84.94 - 1.00 - 35.28 - 0.52) = 43.34 GB each, 161.4 GiB on 4",
        "0.9 x 84.94 - 35.28 - 0.52 = 40.66 GB each, 151.5 GiB on 4",
        "steps by roofline: compute_efficiency=0.7, bandwidth_efficiency=0.8, ",
        "ridge: 295 FLOP/byte; decodes reach it with 340 rows by their weights alone, and ",
        "weights 70%, links 30%",
        "a roofline with the default efficiencies is optimistic: the products of measured steps",
        "serve with limits.max_num_seqs=118 limits.max_num_batched_tokens=640",
        "64 KV heads (MHA)",
        "1 device: the model does not fit: 141.1 GB of weights",
    ):
        assert words in out, words


def test_it_says_what_does_not_fit_and_what_is_left_idle(plan):
    eight = ("model=llama-3-8b", "hardware=a100-80g", "limits.max_num_seqs=2048")
    code, out, _ = plan(*eight, "limits.kv_cache_memory_bytes=68000000000",
                        "limits.max_num_batched_tokens=16384")  # fmt: skip
    assert code == 0
    assert "DOES NOT FIT by the estimate of workspace" in out
    assert "9.43 GB more than there are" in out
    assert "lacking (kv_cache_memory_bytes)" in out
    assert "-9.43" in out
    _, out, _ = plan(*eight[:2], "limits.num_blocks_override=100")
    assert "KV: 16,384 blocks of 16 = 262,144 tokens, and the null block" in out
    assert "the host hands out 99 blocks = 1,584 tokens, 0.21 GB with the null block" in out
    assert "DOES NOT FIT" not in out
    _, out, _ = plan(*eight[:2])
    assert "hands out" not in out


def test_tp_is_short_for_the_setting():
    short, long = configured(*LLAMA, "tp=4"), configured(*LLAMA, "limits.tensor_parallel_size=4")
    assert short == long
    assert short.num_devices == 4
    assert configured(*LLAMA, "tp=4", "limits.tensor_parallel_size=4") == short


def numbers(found):
    if isinstance(found, dict | list):
        for value in found.values() if isinstance(found, dict) else found:
            yield from numbers(value)
    elif isinstance(found, float):
        yield found


def test_json_has_every_figure(plan, tmp_path):
    path = tmp_path / "plan.json"
    code, _, _ = plan(*LLAMA, "tp=4", "--input-tokens", "100", "--output-tokens", "50",
                      "--tpot-ms", "30", "--json", str(path))  # fmt: skip
    assert code == 0
    found = json.loads(path.read_text())
    demand = Demand(input_tokens=100, output_tokens=50, tpot_s=0.03)
    expected = asdict(make_plan(configured(*LLAMA, "tp=4"), demand))
    assert found == {"model": "llama-3-70b", **json.loads(json.dumps(expected))}
    assert set(found) == {"model", *(field.name for field in fields(Plan))}
    assert all(math.isfinite(number) for number in numbers(found))


def test_where_no_limits_serve_it_says_so_and_the_rest_of_the_plan(plan):
    code, out, _ = plan(*LLAMA, "tp=4", "--tpot-ms", "1")
    assert code == 0
    assert "no limits to advise: a TPOT of 1 ms cannot be kept: a step of one request" in out
    assert "16,384 blocks" in out


def test_a_table_without_an_answer_leaves_dashes(plan, tmp_path):
    header = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,"
    path = tmp_path / "perf.csv"
    path.write_text(f"{header}tensor_parallel\nm,h,512,1,8,10,4,4\nm,h,512,2,8,20,6,4\n")
    code, out, _ = plan(
        *LLAMA, "tp=4", "cost_model=table", "cost_model.format=splitwise", "cost_model.entry=m/h",
        f"cost_model.path={path}", "--input-tokens", "64", "--output-tokens", "64",
    )  # fmt: skip
    assert code == 0
    rows = [line.split("│")[1:4] for line in out.splitlines() if line.count("│") == 12]
    steps = {rows_.strip(): (step.strip(), bound.strip()) for rows_, step, bound in rows}
    assert steps["2"] == ("6", "decodes 100%")
    assert steps["4"] == ("-", "-")
    assert "nan" not in out.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*LLAMA,), "the model does not fit: 141.1 GB of weights on each of 1 H100 SXM"),
        ((*LLAMA, "tp=3"), "tensor_parallel_size=3 does not divide num_kv_heads=8"),
        ((*LLAMA, "tp=2", "limits.tensor_parallel_size=4"),
         "tp=2 and limits.tensor_parallel_size=4 are one setting: give it once"),
        ((*LLAMA, "tp=2", "tp=4"), "tp=2 and tp=4 are one setting: give it once"),
        ((*LLAMA, "tp=0"), "tensor_parallel_size must be an integer of at least 1, got 0"),
        ((*LLAMA, "tp=4", "hardware.bytes_per_s=-1"), "hardware.bytes_per_s must be a number ab"),
        ((*LLAMA, "tp=4", "hardware.bytes_per_s=0"), "hardware.bytes_per_s must be a number abo"),
        ((*LLAMA, "tp=4", "hardware.flop_per_s.bfloat16=nan"), "flop_per_s.bfloat16 must be"),
        ((*LLAMA, "tp=4", "hardware.flop_per_s.bfloat16=.inf"), "flop_per_s.bfloat16 must be"),
        ((*LLAMA, "tp=4", "hardware.memory_bytes=0"), "hardware.memory_bytes must be an integer"),
        ((*LLAMA, "tp=4", "hardware.bytes_per_s=2039"),
         "hardware.bytes_per_s=2039 is in bytes per second; did you mean 2039e9?"),
        ((*LLAMA, "tp=4", "hardware.flop_per_s.bfloat16=312"),
         "hardware.flop_per_s.bfloat16=312 is in FLOP per second; did you mean 312e12?"),
        ((*LLAMA, "tp=4", "hardware.flop_per_s=312"), "hardware.flop_per_s must be a rate per dty"),
        ((*LLAMA, "tp=4", "hardware.memory_bytes=80"),
         "hardware.memory_bytes=80 is in bytes; did you mean 80000000000?"),
        ((*LLAMA, "tp=4", "hardware.memory_bytes=500000000"),
         "hardware.reserved_bytes=1000000000 is more than hardware.memory_bytes=500000000"),
        ((*LLAMA, "tp=4", "cost_model.link_efficiency=0"), "cost_model.link_efficiency must be"),
        ((*LLAMA, "tp=4", "model.num_layers=0"), "num_layers must be an integer from 1"),
        ((*LLAMA, "tp=4", "limits.max_model_len=9000"), "is beyond the model's 8192 positions"),
        ((*LLAMA, "tp=4", "--input-tokens", "8000"), "beyond max_model_len=8192"),
        ((*LLAMA, "tp=4", "--input-tokens", "0"), "input_tokens must be an integer from 1"),
        ((*LLAMA, "tp=4", "--output-tokens", "-5"), "output_tokens must be an integer from 1"),
        ((*LLAMA, "tp=4", "--tpot-ms", "0"), "--tpot-ms must be a number above 0"),
        ((*LLAMA, "tp=4", "--tpot-ms", "nan"), "--tpot-ms must be a number above 0"),
        ((*LLAMA, "tp=4", "--tpot-ms", "inf"), "--tpot-ms must be a number above 0"),
        ((*LLAMA, "tp=4", "admission=sjf"), "admission was set, but nothing reads it"),
        ((*LLAMA, "tp=4", "workload=demo"), "workload was set, but nothing reads it"),
        ((*LLAMA, "tp=4", "executor=simulated"), "executor was set, but nothing reads it"),
        ((*LLAMA, "tp=4", "limits.swap_space_gib=1"), "limits.swap_space_gib was set, but noth"),
        ((*LLAMA, "tp=4", "limits.kv_cache_memory_bytes=1000000000",
          "limits.memory_utilization=0.5"), "limits.memory_utilization was set, but nothing"),
        ((*LLAMA, "tp=4", "speed=1"), "Could not override 'speed'"),
        ((*LLAMA, "llama"), "'llama' is no override"),
        (("model=llama-3-8b", "hardware=host-cpu", "tp=2", "hardware.memory_bytes=40000000000"),
         "tensor_parallel_size=2: hardware host CPU has no link"),
        (("model=opt-13b", "hardware=h100", "--compile"), "gated_mlp=false, as OPT and GPT have"),
        (("model=llama-3-8b", "hardware=a100-80g", "--compile"),
         "--compile: JAX cannot compile for A100-80G SXM without it"),
        ((*LLAMA, "tp=4", "--json", "no/such/place.json"), "no/such/place.json cannot be written"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_nonsense_is_a_clear_error(plan, arguments, message):
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("group", "cls"), [("hardware", Hardware), ("model", Dimensions)])
@pytest.mark.parametrize("value", ["nan", "-1"])
def test_no_number_of_a_config_takes_nonsense(plan, group, cls, value):
    made = {
        "hardware": configured(*LLAMA, "tp=4").hardware,
        "model": configured(*LLAMA, "tp=4").model,
    }
    for field in fields(cls):
        known = getattr(made[group], field.name)
        if isinstance(known, bool | str | None):
            continue
        code, _, err = plan(*LLAMA, "tp=4", f"{group}.{field.name}={value}")
        assert code == 2, field.name
        assert f"{field.name} must be" in err


# --compile.


def test_a_compiled_step_takes_the_place_of_the_estimate(plan, monkeypatch):
    asked = []

    def compiler(function, *arguments):
        asked.append((function, *arguments))
        return 123_000_000

    monkeypatch.setattr(compiled, "in_compiler_process", compiler)
    code, out, err = plan(*LLAMA, "tp=4", "limits.kv_cache_dtype=int8", "--compile")
    assert code == 0
    assert "as its compiler counts; estimate 0.52 GB" in out
    assert "35.28 - 0.12) = " in out
    assert "compiling the largest step" in err
    ((_, target, sizes),) = asked
    assert target == "h100"
    assert {key: sizes[key] for key in sizes if key != "config"} == {
        "num_tokens": 512, "num_rows": 32, "context_len": 16, "max_model_len": 8192,
        "block_size": 16, "dtype": "bfloat16", "kv_cache_dtype": "int8",
        "tensor_parallel_size": 4,
    }  # fmt: skip
    assert sizes["config"].num_kv_heads == 8


def test_a_compiler_that_is_not_installed_is_named(plan):
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed")
    code, _, err = plan("model=llama-3-8b", "hardware=tpu-v5e", "tp=4", "--compile")
    assert code == 2
    assert "--compile: cannot compile for v5e" in err
    assert "`make check-kernels` installs what it needs, into .venv/.compilers" in err


@pytest.mark.slow
def test_the_compiler_counts_less_than_the_estimate():
    pytest.importorskip("libtpu")
    setup = configured("model=llama-3-8b", "hardware=tpu-v5e", "tp=4", "model.num_layers=2")
    _, limits = setup.limits()
    estimate = step_bytes(
        setup.part, num_tokens=limits.max_num_batched_tokens, num_rows=32, num_devices=4
    )
    assert 0 < compiled.workspace_bytes(setup) < estimate


def test_a_dtype_without_a_rate_says_what_would_give_it_one(plan):
    tpu = ("model=tiny", "hardware=tpu-v5e")
    code, _, err = plan(*tpu)
    assert code == 2
    assert "model.dtype=float32: hardware TPU v5e has no rate for it" in err
    advised = err.partition("add ")[2].partition("=")[0]
    assert advised == "+hardware.flop_per_s.float32"
    assert plan(*tpu, f"{advised}=30e12")[0] == 0
