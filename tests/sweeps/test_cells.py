"""What names a cell, what is known of it from the disk, and the table that is made of that."""

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from paxserve import files
from paxserve.hydra_config import compose_config
from paxserve.sweep.cell import Cell, axes_of, value_of
from paxserve.sweep.directory import State, SweepDirectory
from paxserve.sweep.lock import locked
from paxserve.sweep.table import sweep_table, write_sweep_table


def cell(**settings):
    keys = ("batching", *(f"limits.{key}" for key in settings if key != "seed"), "seed")
    limits = {key: value for key, value in settings.items() if key != "seed"}
    config = {"choices": {"batching": "static"}, "limits": limits, "seed": settings.get("seed", 0)}
    return Cell(overrides=("a=1",), keys=keys, config=config)


def composed(*overrides):
    plain, choices, _ = compose_config(overrides)
    return Cell(overrides=overrides, keys=(), config={"choices": choices, **plain})


# Names.


def test_a_name_is_always_the_same():
    """In every process and version: resumed sweeps are found by it."""
    config = {"choices": {"b": "x", "a": "y"}, "limits": {"n": 1, "m": None}, "seed": 0}
    assert Cell(overrides=(), keys=(), config=config).name == "3362eca88f86"


def test_a_name_follows_from_the_config_not_from_how_it_was_asked_for():
    one = composed("limits.block_size=8", "seed=1", "batching=static", "limits.max_num_seqs=32")
    two = composed("batching=static", "seed=1", "limits.block_size=8", "run_dir=elsewhere")
    assert one.name == two.name
    turned = dict(reversed(one.config.items()))
    assert Cell(overrides=(), keys=(), config=turned).name == one.name


@pytest.mark.parametrize(
    "change",
    ["seed=2", "limits.block_size=16", "batching=textbook", "workload.limit=3", "gate=[watermark]"],
)
def test_whatever_a_run_reads_changes_its_name(change):
    base = ("seed=1", "limits.block_size=8", "batching=static")
    assert composed(*base).name != composed(*base, change).name


def test_a_name_does_not_depend_on_the_hash_seed():
    code = (
        "from paxserve.hydra_config import compose_config\n"
        "from paxserve.sweep.cell import Cell\n"
        "plain, choices, _ = compose_config(['seed=3', 'gate=[watermark,past_future]'])\n"
        "print(Cell(overrides=(), keys=(), config={'choices': choices, **plain}).name)\n"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert names == {composed("seed=3", "gate=[watermark,past_future]").name + "\n"}


def test_a_cell_is_plain_data():
    one = cell(block_size=8, seed=3)
    again = Cell.from_json(json.loads(json.dumps(one.to_json())))
    assert again == one
    assert again.name == one.name


def test_values_and_axes():
    config = composed(
        "workload=synthetic", "workload/arrivals=gamma", "workload.arrivals.rate=3"
    ).config
    assert value_of(config, "workload.arrivals") == "gamma"
    assert value_of(config, "workload.arrivals.rate") == 3
    assert value_of(config, "batching") == "chunked_prefill"
    assert value_of(config, "limits.nothing.there") is None
    cells = [cell(block_size=8, seed=1), cell(block_size=16, seed=1)]
    assert axes_of(cells) == ["limits.block_size"]
    assert axes_of([*cells, cell(block_size=8, seed=2)]) == ["limits.block_size", "seed"]


# The directory.


def finish(directory, one, summary=None, error=None):
    running = directory.begin(one)
    if summary is not None:
        (running / "summary.json").write_text(json.dumps(summary))
        (running / "complete").write_text("")
    if error is not None:
        (running / "error.txt").write_text(error)
    directory.keep(one.name, running)


def test_the_state_of_a_cell_is_what_is_on_disk(tmp_path):
    directory = SweepDirectory.made(tmp_path / "new" / "sweep")
    one = cell(seed=1)
    assert directory.state(one) is State.MISSING
    running = directory.begin(one)
    (running / "complete").write_text("")
    assert directory.state(one) is State.MISSING
    directory.keep(one.name, running)
    assert directory.state(one) is State.COMPLETE
    finish(directory, one, error="no")
    assert directory.state(one) is State.FAILED
    finish(directory, one, {"duration": 1.0}, error="nothing was completed")
    assert directory.state(one) is State.FAILED
    assert [path.name for path in directory.path.iterdir()] == [one.name]


def test_what_a_killed_sweep_left_is_kept_if_it_is_whole(tmp_path):
    directory = SweepDirectory.made(tmp_path)
    whole, broken = cell(seed=1), cell(seed=2)
    (directory.begin(whole) / "complete").write_text("")
    (directory.begin(broken) / "summary.json").write_text("{}")
    (tmp_path / "table.csv.tmp-77").write_text("half")
    (tmp_path / f"{broken.name}.tmp-77").mkdir()
    directory.tidy()
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]
    assert directory.state(whole) is State.COMPLETE


def test_cells_add_up(tmp_path):
    directory = SweepDirectory.made(tmp_path)
    directory.add([cell(seed=1), cell(seed=2), cell(seed=1)])
    again = SweepDirectory.made(tmp_path)
    again.add([cell(seed=3), cell(seed=2)])
    assert SweepDirectory.read(tmp_path).cells() == [cell(seed=n) for n in (1, 2, 3)]


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ValueError, match="not empty and holds no sweep"):
        SweepDirectory.made(tmp_path)
    with pytest.raises(ValueError, match="not empty and holds no sweep"):
        SweepDirectory.made(tmp_path / "mine")
    with pytest.raises(ValueError, match="holds no sweep"):
        SweepDirectory.read(tmp_path)


def test_a_sweep_that_was_killed_at_its_beginning_is_a_sweep(tmp_path):
    (tmp_path / "lock").write_text("")
    (tmp_path / "cells.jsonl.tmp-5").write_text("half")
    assert SweepDirectory.made(tmp_path).cells() == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    files.write_text(tmp_path / "a.txt", "old")

    def fail(what, path):
        if what == "written":
            raise OSError("the disk is full")

    monkeypatch.setattr(files, "boundary", fail)
    with pytest.raises(OSError, match="full"):
        files.write_text(tmp_path / "a.txt", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


# The lock.

HOLDER = """
import os, sys, time
from pathlib import Path
from paxserve.sweep.lock import locked
with locked(Path(sys.argv[1]), say=print) as lock:
    if os.fork() == 0:  # a cell, which has the lock with us and outlives us
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_sweep_is_refused_and_a_killed_one_waited_for(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    said = []

    def let_the_cell_end(message):
        said.append(message)
        holder.stdin.close()

    with holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            in_use = f"in use by another sweep .process {holder.pid} on"
            with pytest.raises(ValueError, match=in_use), locked(tmp_path, say=print):
                pass
        finally:
            holder.kill()
            holder.wait()
        with locked(tmp_path, say=let_the_cell_end):
            assert said == [
                f"waiting for the last cells of a sweep that was killed (process {holder.pid})"
            ]
            assert (tmp_path / "lock").read_text().split()[0] == str(os.getpid())
    with locked(tmp_path, say=said.append):
        assert len(said) == 1


# The table.


def test_the_table_has_a_row_per_cell(tmp_path):
    directory = SweepDirectory.made(tmp_path)
    cells = [cell(block_size=b, seed=s) for s in (1, 0) for b in (16, 8, None, "auto")]
    directory.add(cells)
    for number, one in enumerate(cells[:-1]):
        if number == 2:
            finish(directory, one, error="no")
        else:
            finish(
                directory, one, {"completed": number, "rate": 1 if number else 0.5, "none": None}
            )
    table = sweep_table(directory)
    assert table.column_names == [
        "cell", "limits.block_size", "seed", "state", "completed", "rate", "none",
    ]  # fmt: skip
    assert [str(kind) for kind in table.schema.types] == [
        "string", "string", "int64", "string", "int64", "double", "double",
    ]  # fmt: skip
    rows = table.to_pylist()
    assert [(row["limits.block_size"], row["seed"]) for row in rows] == [
        ("8", 0), ("8", 1), ("16", 0), ("16", 1), ("auto", 0), ("auto", 1), (None, 0), (None, 1),
    ]  # fmt: skip
    assert [row["state"] for row in rows].count("complete") == 6
    assert (rows[-1]["state"], rows[-1]["completed"]) == ("failed", None)
    assert (rows[4]["state"], rows[4]["cell"]) == ("missing", cells[-1].name)


def test_the_table_does_not_depend_on_the_order_of_things(tmp_path):
    tables = []
    for number, order in enumerate(([0, 1, 2], [2, 0, 1])):
        directory = SweepDirectory.made(tmp_path / str(number))
        directory.add([cell(seed=s) for s in range(3)])
        for seed in order:
            finish(directory, cell(seed=seed), {"duration": 0.1 * seed})
        write_sweep_table(directory)
        tables.append(
            [(directory.path / f"table.{kind}").read_bytes() for kind in ("parquet", "csv")]
        )
    assert tables[0] == tables[1]
    assert pq.read_table(tmp_path / "0" / "table.parquet")["seed"].to_pylist() == [0, 1, 2]
