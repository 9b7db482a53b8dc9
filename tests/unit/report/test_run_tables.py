"""Saved runs, read as data frames."""

import shutil
from dataclasses import replace

import pandas as pd
import pytest
from saved_runs import serve, write_blocks

from paxserve.ledger import SlotCounts
from paxserve.report.run_tables import MissingData, RunTables, labels


@pytest.fixture
def run(tmp_path):
    return serve(tmp_path / "run", [1, 3, 2])


def test_the_tables_hold_the_run(run):
    assert run.name == "run"
    assert run.summary["completed"] == 3
    assert run.requests["num_output_tokens"].tolist() == [1, 3, 2]
    assert run.requests["itl_s"].map(list).tolist() == [[], [1.0, 1.0], [1.0]]
    assert run.steps["num_tokens"].tolist() == [6, 4, 2]
    assert (run.decisions["kind"] == "entered").sum() == 3
    assert run.blocks is None
    assert run.limit("max_num_seqs") == 2
    assert (run.origin_s, run.end_s) == (0.0, 3.0)


def test_the_ledger_sums_to_the_pool_at_every_step(run):
    classes = list(SlotCounts._fields)
    assert run.ledger.columns.tolist()[:3] == ["step_id", "start_s", "duration_s"]
    assert set(classes) <= set(run.ledger.columns)
    assert run.ledger.iloc[:, 3:].sum(axis=1).tolist() == [17 * 4] * 3
    assert run.ledger["live"].tolist() == [6, 7, 9]


def test_blocks_are_read_where_they_were_recorded(run):
    assert write_blocks(run, (0, 1, "0", "live")).need("blocks", "holder").holder.tolist() == ["0"]
    with pytest.raises(MissingData, match=r"blocks.parquet does not exist: the run did not record"):
        run.need("blocks", "holder")


def test_a_directory_without_a_finished_run_is_refused(run, tmp_path):
    with pytest.raises(MissingData, match="nowhere holds no finished run"):
        RunTables.read(tmp_path / "nowhere")
    (run.path / "complete").unlink()
    with pytest.raises(MissingData, match="holds no finished run"):
        RunTables.read(run.path)


def test_a_missing_file_or_column_is_named(run):
    with pytest.raises(MissingData, match=r"steps.parquet has no column colour"):
        run.need("steps", "num_rows", "colour")
    (run.path / "steps.parquet").unlink()
    with pytest.raises(MissingData, match=r"steps.parquet does not exist"):
        RunTables.read(run.path)


def test_what_was_asked_for_stands_in_for_what_was_applied(run, tmp_path):
    (run.path / "engine.json").unlink()
    with pytest.raises(MissingData, match=r"engine.json has no limits.max_num_seqs"):
        RunTables.read(run.path).limit("max_num_seqs")
    assert (
        replace(run, engine={}, config={"limits": {"max_num_seqs": 7}}).limit("max_num_seqs") == 7
    )
    shutil.move(run.path, tmp_path / "moved")
    assert RunTables.read(tmp_path / "moved", name="mine").name == "mine"


def test_a_run_is_named_by_what_is_unusual_about_it(run):
    def named(**choices):
        return replace(run, config={"choices": run.config["choices"] | choices})

    assert run.title == "run  (chunked_prefill, on_demand, paged)"
    odd = named(victim="my_module:Mine", prefix_cache="radix", admission="Fair(weights=(1, 2))")
    assert odd.policies == {
        "batching": "chunked_prefill",
        "reservation": "on_demand",
        "placement": "paged",
        "admission": "Fair",
        "prefix_cache": "radix",
        "victim": "Mine",
    }
    assert named(gate="").policies == run.policies
    assert named(gate="watermark,mine:Own").policies["gate"] == "watermark+Own"
    assert labels([run, named(batching="static")]) == ["run (chunked_prefill)", "run (static)"]
    assert labels([run, odd]) == ["run", "run (Fair, radix, Mine)"]
    assert labels([run, replace(run, name="again")]) == ["run", "again"]
    assert labels([run]) == ["run"]


def test_a_run_of_no_request_has_no_end(run):
    none = replace(run, requests=run.requests[:0], steps=run.steps[:0])
    assert (none.origin_s, none.end_s) == (0.0, 0.0)
    assert isinstance(none.ledger, pd.DataFrame)
