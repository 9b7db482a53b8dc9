"""`paxserve.run` and `paxserve.compare`: what the command line does, as data frames."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

import paxserve
from paxserve.batching import Decodes, Grant, split
from paxserve.cli import main
from paxserve.ledger import SlotCounts
from paxserve.notebook import _Plots

REQUESTS = [
    {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 4},
    {"id": "b", "prompt_token_ids": [8, 9], "max_tokens": 6, "arrival_s": 1.0},
    {"id": "c", "prompt_token_ids": [10, 11, 12, 13], "max_tokens": 3, "arrival_s": 2.5},
]
SCRIPTED = (
    "executor=scripted", "limits.max_model_len=32", "limits.num_blocks_override=9",
    "limits.max_num_seqs=4", "workload=jsonl", "workload.path=requests.jsonl",
)  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    lines = "".join(json.dumps(request) + "\n" for request in REQUESTS)
    (tmp_path / "requests.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class OneAtATime:
    """A newcomer only when nobody runs."""

    most: int = 1
    release = "at_finish"
    whole_prompts = False

    def propose(self, view):
        decodes, prompts = split(view.running)
        yield Decodes(decodes)
        waiting = list(view.waiting())[: max(0, self.most - len(view.running))]
        for request in prompts or waiting:
            yield Grant(request, request.num_remaining_tokens)


def test_a_result_is_what_the_command_line_writes(workplace):
    result = paxserve.run([*SCRIPTED, "run_dir=mine"])
    assert main(["run", *SCRIPTED, "run_dir=theirs"]) == 0
    theirs = paxserve.Result.read("theirs")
    assert (result.name, result.path) == ("mine", Path("mine"))
    pd.testing.assert_series_equal(result.summary, theirs.summary, check_names=False)
    for table in ("requests", "steps", "decisions", "ledger"):
        pd.testing.assert_frame_equal(getattr(result, table), getattr(theirs, table))
    assert result.requests["ttft_s"].tolist() == [1.0, 1.0, 1.5]
    assert set(SlotCounts._fields) <= set(result.ledger)
    assert repr(result) == (
        "Result(mine  (chunked_prefill, on_demand, paged): 3 of 3 requests completed in 7.0 s)"
    )


def test_files_that_nobody_asked_for_are_temporary(workplace):
    before = set(workplace.iterdir())
    result = paxserve.run(SCRIPTED)
    assert set(workplace.iterdir()) == before
    assert (result.path / "complete").exists()
    assert result.name == "run"
    script = f"import paxserve; print(paxserve.run({list(SCRIPTED)!r}).path)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    left = done.stdout.strip()
    assert "paxserve-" in left
    assert not result.path.parent.joinpath(left).exists()


def test_a_policy_of_a_cell(workplace):
    result = paxserve.run([*SCRIPTED, "run_dir=own"], policies={"batching": OneAtATime(most=1)})
    assert result.steps["num_running"].max() == 1
    assert result.requests["queue_time_s"].tolist() == [0.0, 3.0, 7.5]
    assert result.tables.config["choices"]["batching"] == "OneAtATime(most=1)"
    assert result.tables.config["batching"] == {}
    assert result.tables.policies["batching"] == "OneAtATime"
    applied = result.tables.engine["policies"]["batching"]
    assert applied == {"class": f"{__name__}:OneAtATime", "most": 1}


@pytest.mark.parametrize(
    ("overrides", "policies", "words"),
    [
        ([], {"batching": OneAtATime}, "batching must be an object of a dataclass"),
        ([], {"batching": "static"}, "batching must be an object of a dataclass"),
        ([], {"batch": OneAtATime()}, "there is no axis 'batch'; there are admission, batching"),
        (["batching=static"], {"batching": OneAtATime()}, "batching was set, but nothing reads"),
        (["+batching.most=2"], {"batching": OneAtATime()}, "batching.most was set, but nothing"),
        (["batching=nonesuch"], {}, "chunked_prefill"),
        (["limits.bogus=1"], {}, "bogus"),
        (["batching=json:JSONDecoder"], {}, "batching=json:JSONDecoder must be a dataclass"),
        (["static"], {}, "'static' is no override"),
        (["limits.max_num_seqs=0"], {}, "max_num_seqs must be an integer of at least 1"),
    ],
    ids=str,
)
def test_mistakes_are_value_errors(overrides, policies, words):
    with pytest.raises(ValueError, match=words):
        paxserve.run([*SCRIPTED, *overrides], policies=policies)


def test_a_string_is_no_list_and_a_full_directory_no_place(workplace):
    with pytest.raises(ValueError, match="must be a list of strings"):
        paxserve.run("executor=scripted")
    (workplace / "full").mkdir()
    (workplace / "full" / "mine").write_text("keep")
    with pytest.raises(ValueError, match="run_dir=full is not empty"):
        paxserve.run([*SCRIPTED, "run_dir=full"])


def test_a_comparison_is_a_tidy_table():
    mine = paxserve.run(SCRIPTED, policies={"batching": OneAtATime()})
    found = paxserve.compare(
        {"static": ["batching=static"], "chunked": [], "mine": mine}, common=SCRIPTED
    )
    table = found.table
    assert table.index.tolist() == ["static", "chunked", "mine"]
    assert table["batching"].tolist() == ["static", "chunked_prefill", "OneAtATime"]
    assert table.loc["mine", "duration"] == mine.summary["duration"]
    assert found["mine"].name == "mine"
    assert mine.name == "run"
    requests = found.requests
    assert requests.groupby("run").size().to_dict() == {"static": 3, "chunked": 3, "mine": 3}
    same = requests.groupby("request_id")["output_token_ids"].agg(
        lambda ids: len(set(map(tuple, ids)))
    )
    assert same.tolist() == [1, 1, 1]
    assert repr(found) == "Comparison(static, chunked, mine)"


def test_runs_of_a_list_are_named_by_what_differs():
    lists = [[*SCRIPTED, "batching=static"], [*SCRIPTED, "victim=newest", "batching=textbook"]]
    found = paxserve.compare(lists)
    assert list(found.results) == ["batching=static", "victim=newest batching=textbook"]
    assert list(paxserve.compare([list(SCRIPTED)]).results) == ["run"]
    with pytest.raises(ValueError, match="two runs are 'batching=static'"):
        paxserve.compare([["batching=static"], ["batching=static"], []])
    with pytest.raises(ValueError, match="nothing to compare"):
        paxserve.compare([])


def test_every_picture_of_results(tmp_path):
    found = paxserve.compare({"a": [], "b": ["batching=static"]}, common=SCRIPTED)
    for name in (name for name in vars(_Plots) if name.startswith("plot_")):
        if name == "plot_blocks" and found["a"].tables.blocks is None:
            with pytest.raises(ValueError, match="did not record"):
                found.plot_blocks()
            continue
        one, both = getattr(found["a"], name)(), getattr(found, name)()
        assert 1 <= len(one.get_axes()) <= len(both.get_axes())
    assert len(found.plot_throughput().get_axes()[0].get_lines()) == 2
    assert found["a"].write_trace() == found["a"].path / "trace.json.gz"
    assert found["a"].write_trace(tmp_path / "t.json").stat().st_size > 1000


def test_importing_paxserve_stays_light():
    heavy = ["jax", "pandas", "matplotlib", "hydra", "pyarrow"]
    script = f"import sys, paxserve; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = paxserve.nonesuch
