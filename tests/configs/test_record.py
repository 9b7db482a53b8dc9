"""`record=compact` at the command line: which files there are, and who says that it needs more."""

import json
import sys

import pyarrow.parquet as pq
import pytest

from paxserve.cli import main
from paxserve.experiment import RECORDS
from paxserve.metrics import LISTS, RequestRecord
from paxserve.notebook import run as run_here
from paxserve.report.run_tables import MissingData, RunTables

SIZES = ("executor=scripted", "limits.max_model_len=64", "limits.num_blocks_override=33",
         "limits.max_num_seqs=4", "workload=synthetic", "workload.num_requests=12",
         "workload/arrivals=all_at_once")  # fmt: skip
LENGTHS = ("workload/lengths=uniform", "workload.lengths.min_input_tokens=3",
           "workload.lengths.max_input_tokens=20",
           "workload.lengths.max_output_tokens=20")  # fmt: skip
FILES = {"complete", "config.yaml", "engine.json", "env.json", "requests.parquet", "steps.parquet",
         "summary.json"}  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


@pytest.fixture
def runs(workplace):
    for name in RECORDS:
        assert main(["run", *SIZES, *LENGTHS, f"record={name}", f"run_dir={name}"]) == 0
    return workplace


def test_a_compact_run_has_the_same_figures_in_fewer_files(runs):
    compact, full = runs / "compact", runs / "full"
    assert {file.name for file in compact.iterdir()} == FILES
    figures = [json.loads((path / "summary.json").read_text()) for path in (compact, full)]
    differing = {name for name, value in figures[1].items() if figures[0][name] != value}
    assert figures[0].keys() == figures[1].keys()
    assert differing <= {"median_itl_ms", "p50_itl_ms", "p90_itl_ms", "p99_itl_ms"}
    tables = [pq.read_table(path / "requests.parquet") for path in (compact, full)]
    assert tables[0] == tables[1].drop_columns(list(LISTS))
    assert tables[1].column_names == list(RequestRecord._fields)
    assert pq.read_table(compact / "steps.parquet") == pq.read_table(full / "steps.parquet")


def test_who_needs_what_was_not_kept_says_so(runs, capsys):
    assert main(["replay", "compact", "admission=sjf"]) == 2
    assert "record=compact" in capsys.readouterr().err
    assert main(["trace", "compact"]) == 2
    assert "run it again with record=full" in capsys.readouterr().err
    assert main(["plot", "compact"]) == 0
    said = capsys.readouterr().out
    assert "memory.png" in said
    for picture in ("timeline", "latency"):
        assert f"no {picture}.png" in said
    tables = RunTables.read("compact")
    assert tables.decisions is None
    with pytest.raises(MissingData, match="record=compact; run it again with record=full"):
        tables.need("requests", "itl_s")


def test_a_replay_compares_requests_and_so_keeps_them(runs, capsys):
    assert main(["replay", "full", "admission=sjf", "record=compact"]) == 2
    assert "record=compact" in capsys.readouterr().err


def test_in_a_notebook_decisions_of_a_compact_run_are_an_error():
    result = run_here([*SIZES, *LENGTHS, "record=compact"])
    assert len(result.requests) == 12
    with pytest.raises(MissingData, match="record=full"):
        result.decisions  # noqa: B018


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("record=some", "record must be one of full, compact, got 'some'"),
        ("record=true", "record must be one of full, compact, got True"),
    ],
)
def test_a_recording_that_does_not_exist_is_an_error(override, words, capsys):
    assert main(["run", *SIZES, override]) == 2
    assert words in capsys.readouterr().err


def test_a_compact_run_keeps_no_history_of_blocks(capsys):
    assert main(["run", *SIZES, "record=compact", "record_blocks=true"]) == 2
    assert "record=compact keeps no history" in capsys.readouterr().err


def test_failures_are_told_though_requests_are_not_kept(capsys):
    """A pool for one request in which outputs outgrow it."""
    small = ("limits.num_blocks_override=3", "limits.block_size=4", "limits.max_model_len=16",
             "workload/lengths=fixed", "workload.lengths.input_tokens=5",
             "workload.lengths.output_tokens=8")  # fmt: skip
    assert main(["run", *SIZES, *small, "record=compact"]) == 1
    said = capsys.readouterr()
    assert "outgrew the KV pool" in said.err + said.out
    assert "... and 9 more; see requests.parquet" in said.err + said.out
