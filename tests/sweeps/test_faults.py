"""A sweep that is killed anywhere loses at most the cells in flight, and a second one finishes
exactly those that are missing; what is on disk is never half of anything.
"""

import json
import random
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from killed_sweeps import ITS_CELL, cells_of, run_sweep

from paxserve.sweep.directory import State, SweepDirectory

READERS = {
    ".json": lambda path: json.loads(path.read_text()),
    ".jsonl": lambda path: [json.loads(line) for line in path.read_text().splitlines()],
    ".yaml": lambda path: yaml.safe_load(path.read_text())["seed"],
    ".parquet": lambda path: pq.read_table(path),
    ".csv": lambda path: path.read_text().endswith("\n"),
    ".txt": lambda path: path.read_text(),
    "": lambda path: path.read_text(),
}
RUN_FILES = {
    "arrivals.jsonl", "complete", "config.yaml", "decisions.parquet", "engine.json", "env.json",
    "log.txt", "outputs.jsonl", "requests.parquet", "steps.parquet", "summary.json",
}  # fmt: skip


def assert_nothing_is_half_written(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file() and ".tmp-" not in file.name:
            assert READERS[file.suffix](file) is not False, file
    for directory in path.iterdir():
        if directory.is_dir() and "." not in directory.name:
            names = {file.name for file in directory.iterdir()}
            assert names == RUN_FILES or "error.txt" in names, directory


def files_in(path: Path) -> dict[str, tuple[int, bytes]]:
    """Contents, and which file on the disk it is: one that was written anew is another."""
    return {
        str(file.relative_to(path)): (file.stat().st_ino, file.read_bytes())
        for file in path.rglob("*")
        if file.is_file()
    }


def states_in(path: Path, cells) -> dict[str, State]:
    directory = SweepDirectory(path)
    return {cell.name: directory.state(cell) for cell in cells}


def begun(boundaries) -> list[str]:
    names = [line.split()[2] for line in boundaries if line.startswith("make")]
    return [name.partition(".running-")[0] for name in names if ".running-" in name]


def table_of(path: Path) -> tuple[bytes, bytes]:
    return (path / "table.parquet").read_bytes(), (path / "table.csv").read_bytes()


def assert_it_goes_on(path: Path, kinds: str, undisturbed: Path, *, resume="missing", num_jobs=1):
    """What the second sweep does after the first one was killed."""
    cells = cells_of(kinds)
    if path.exists():
        assert_nothing_is_half_written(path)
    before = states_in(path, cells)
    kept = {
        cell.name: files_in(path / cell.name)
        for cell in cells
        if before[cell.name] != State.MISSING
    }
    whole = {
        directory.name.partition(".running-")[0]
        for directory in path.glob("*.running-*")
        if (directory / "complete").is_file()
    }
    again = {State.MISSING, *([State.FAILED] if resume == "failed" else [])}
    missing = [name for name, state in before.items() if state in again and name not in whole]
    code, boundaries = run_sweep(path, kinds, resume=resume, num_jobs=num_jobs)
    assert begun(boundaries) == missing
    assert code == (1 if State.FAILED in states_in(undisturbed, cells).values() else 0)
    assert states_in(path, cells) == states_in(undisturbed, cells)
    for name, files in kept.items():
        if before[name] not in again and name not in whole:
            assert files_in(path / name) == files
    assert table_of(path) == table_of(undisturbed)
    assert {entry.name for entry in path.iterdir()} == {
        entry.name for entry in undisturbed.iterdir()
    }
    return missing


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By kinds of cells: a sweep that nobody killed, and the boundaries it came by."""
    made = {}

    def sweep_of(kinds):
        if kinds not in made:
            path = tmp_path_factory.mktemp("undisturbed") / "sweep"
            code, boundaries = run_sweep(path, kinds)
            assert code == (1 if "f" in kinds else 0)
            made[kinds] = path, boundaries
        return made[kinds]

    return sweep_of


def kill_at(tmp_path, undisturbed, kinds, at):
    reference, boundaries = undisturbed(kinds)
    path = tmp_path / str(at) / "sweep"
    path.parent.mkdir()
    code, came_by = run_sweep(path, kinds, at=at)
    assert (code, len(came_by)) == (-9, at + 1)
    in_flight = assert_it_goes_on(path, kinds, reference)
    return boundaries[at], in_flight


def sample_of(boundaries):
    """One of each kind: what happens, and to which kind of file."""
    kinds = {}
    for number, line in enumerate(boundaries):
        what, _, name = line.split()
        is_cell = name.partition(".")[0].isalnum() and len(name.partition(".")[0]) == 12
        kinds.setdefault((what, "cell" if is_cell else name), number)
    return kinds


def test_there_is_a_boundary_at_every_change_of_the_disk(undisturbed):
    path, boundaries = undisturbed("oo")
    kinds = sample_of(boundaries)
    written = {name for what, name in kinds if what == "written"}
    assert written == (RUN_FILES - {"log.txt"}) | {"cells.jsonl", "table.parquet", "table.csv"}
    assert {what for what, name in kinds if name == "complete"} == {"write", "written", "there"}
    assert {what for what, name in kinds if name == "cell"} == {"make", "rename", "renamed"}
    assert begun(boundaries) == [cell.name for cell in cells_of("oo")]
    assert_nothing_is_half_written(path)


AT = (
    ("written", "cells.jsonl"), ("make", "cell"), ("written", "requests.parquet"),
    ("written", "complete"), ("there", "complete"), ("renamed", "cell"), ("written", "table.csv"),
)  # fmt: skip


@pytest.mark.parametrize("kind", AT, ids=" ".join)
def test_killed_at_a_boundary(tmp_path, undisturbed, kind):
    kill_at(tmp_path, undisturbed, "oo", sample_of(undisturbed("oo")[1])[kind])


@pytest.mark.slow
def test_killed_at_every_boundary(tmp_path, undisturbed):
    """Two cells, of which one fails by itself."""
    boundaries = undisturbed("of")[1]
    lost = [kill_at(tmp_path, undisturbed, "of", at)[1] for at in range(len(boundaries))]
    assert len(lost) > 45
    assert {len(missing) for missing in lost} == {0, 1, 2}


def kill_cell_at(tmp_path, undisturbed, at):
    """The others go on, and `resume=failed` runs it again."""
    kinds = "oo"
    reference, _ = undisturbed(kinds)
    path = tmp_path / str(at) / "sweep"
    path.parent.mkdir()
    code, _ = run_sweep(path, kinds, at=at, victim=ITS_CELL)
    states = states_in(path, cells_of(kinds))
    if State.FAILED not in states.values():  # the boundary was the sweep's own
        assert code == 0
        return
    assert code == 1
    assert sorted(states.values()) == [State.COMPLETE, State.FAILED]
    (failed,) = [name for name, state in states.items() if state is State.FAILED]
    assert "ended by SIGKILL" in (path / failed / "error.txt").read_text()
    assert assert_it_goes_on(path, kinds, reference, resume="failed") == [failed]


@pytest.mark.parametrize(
    "kind", [("written", "steps.parquet"), ("there", "complete")], ids=" ".join
)
def test_a_cell_killed_at_a_boundary(tmp_path, undisturbed, kind):
    kill_cell_at(tmp_path, undisturbed, sample_of(undisturbed("oo")[1])[kind])


@pytest.mark.slow
def test_a_cell_killed_at_every_boundary(tmp_path, undisturbed):
    for at in range(len(undisturbed("oo")[1])):
        kill_cell_at(tmp_path, undisturbed, at)


@pytest.mark.slow
def test_killed_while_the_killed_sweep_is_finished(tmp_path, undisturbed):
    """A kill at every boundary of the second sweep, too, with the first killed in the middle."""
    reference, boundaries = undisturbed("oo")
    middle = sample_of(boundaries)["there", "complete"]
    for at in range(0, len(boundaries) - middle, 3):
        path = tmp_path / str(at) / "sweep"
        path.parent.mkdir()
        assert run_sweep(path, "oo", at=middle)[0] == -9
        code, _ = run_sweep(path, "oo", at=at)
        if code == -9:
            assert_it_goes_on(path, "oo", reference)


@pytest.mark.slow
def test_killed_while_everything_runs_again(tmp_path, undisturbed):
    """An old result is there until the new one is: none is ever lost."""
    reference, boundaries = undisturbed("oo")
    path = tmp_path / "sweep"
    shutil.copytree(reference, path)
    replaced = 0
    for at in range(len(boundaries)):
        code, came_by = run_sweep(path, "oo", resume="all", at=at)
        assert code == -9
        replaced += came_by[-1].startswith("replace")
        assert assert_it_goes_on(path, "oo", reference) == []
    assert replaced == 2


@pytest.mark.slow
def test_killed_at_20_random_moments(tmp_path, undisturbed):
    """Two cells at a time, which end with the sweep by themselves."""
    kinds, rng = "ofoo", random.Random(7)
    reference, _ = undisturbed(kinds)
    start_s, outcomes = time.monotonic(), []
    run_sweep(tmp_path / "sweep", kinds, num_jobs=2)
    longest_s = time.monotonic() - start_s
    for moment in range(20):
        path = tmp_path / str(moment) / "sweep"
        path.parent.mkdir()
        code, _ = run_sweep(path, kinds, num_jobs=2, after_s=rng.uniform(0.0, longest_s))
        before = states_in(path, cells_of(kinds)) if path.exists() else {}
        if code == -9:
            outcomes.append(list(before.values()).count(State.MISSING))
        assert_it_goes_on(path, kinds, reference)
    assert len(outcomes) > 10  # killed before its end
    assert len(set(outcomes)) > 1  # with more and with less left to do
