"""`executor.leaps`: a run with and without it writes the same files, but for one figure."""

import json
import sys

import pyarrow.parquet as pq
import pytest

from paxserve.cli import main

RUN = ("run", "executor=simulated", "model=llama-3-8b", "baseline=vllm_v1", "workload=synthetic",
       "workload.num_requests=30", "workload.arrivals.rate=4", "workload/lengths=uniform",
       "workload.lengths.max_input_tokens=200")  # fmt: skip
TABLES = ("requests", "steps", "decisions")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


def test_leaping_changes_one_figure_of_a_run(workplace, capsys):
    assert main([*RUN, "run_dir=with"]) == 0
    said = capsys.readouterr().err
    assert main([*RUN, "executor.leaps=false", "run_dir=without"]) == 0
    assert "leapt" not in capsys.readouterr().err
    with_leaps, without = (
        json.loads((workplace / name / "summary.json").read_text()) for name in ("with", "without")
    )
    num_leapt, num_steps = with_leaps.pop("leapt_steps"), without["num_steps"]
    assert without.pop("leapt_steps") == 0
    assert with_leaps == without
    assert num_steps / 2 < num_leapt < num_steps
    assert f"{num_steps} steps, {num_leapt} of them leapt" in said
    assert "us per step" in said
    assert "us per token" in said
    for table in TABLES:
        one, other = (
            pq.read_table(workplace / name / f"{table}.parquet") for name in ("with", "without")
        )
        assert one == other
    for name in ("outputs.jsonl", "arrivals.jsonl"):
        assert (workplace / "with" / name).read_text() == (workplace / "without" / name).read_text()


OWN = """
from dataclasses import dataclass

from paxserve.batching.textbook import Textbook


@dataclass(frozen=True)
class OneByOne:
    release = "at_finish"
    whole_prompts = True

    def propose(self, view):
        yield from Textbook().propose(view)
"""


def test_a_batching_that_does_not_say_what_is_steady_is_named_once(workplace, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(workplace), *sys.path])
    said = "does not say what is steady, so steps are taken one by one"
    run = [*(o for o in RUN if not o.startswith("baseline")), "limits.max_model_len=512"]
    own = [*run, "batching=my_own:OneByOne"]
    (workplace / "my_own.py").write_text(OWN)
    assert main([*own, "run_dir=a"]) == 0
    assert capsys.readouterr().err.count(f"batching OneByOne {said}") == 1
    assert main([*own, "executor.leaps=false", "run_dir=b"]) == 0
    assert said not in capsys.readouterr().err
    for batching in ("textbook", "alternating"):  # steady, and not, and both say so
        assert main([*run, f"batching={batching}", f"run_dir={batching}"]) == 0
        assert said not in capsys.readouterr().err


def test_it_is_true_or_false(capsys):
    assert main([*RUN, "executor.leaps=2"]) == 2
    assert "executor.leaps must be true or false, got 2" in capsys.readouterr().err
