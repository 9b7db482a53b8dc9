"""Sweeps in processes: what runs, what is left, what is said. First with cells that do what a test
wants of them, then with real ones.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from paxserve import files
from paxserve.cli import main
from paxserve.sweep import processes
from paxserve.sweep.cell import Cell
from paxserve.sweep.directory import State, SweepDirectory
from paxserve.sweep.run import sweep

ACTING = (sys.executable, str(Path(__file__).with_name("acting_cell.py")))


def acting(*acts):
    return [
        Cell(overrides=(f"act={act}",), keys=("act",), config={"choices": {}, "act": act})
        for act in acts
    ]


def started(path):
    file = path / "started.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [line.split()[0].removeprefix("act=") for line in lines]


def states(path, cells):
    directory = SweepDirectory.read(path)
    return [directory.state(cell).value for cell in cells]


@pytest.fixture
def acted(monkeypatch):
    monkeypatch.setattr(processes, "COMMAND", ACTING)


@pytest.mark.usefixtures("acted")
def test_a_failing_cell_does_not_hurt_the_others(tmp_path, capsys):
    cells = acting("fail-1", "ok-1", "kill-1", "ok-2", "exit-3", "exit-0", "ok-3")
    assert sweep(tmp_path, cells, resume="missing", runner=processes.processes(1)) == 1
    assert states(tmp_path, cells) == [
        "failed", "complete", "failed", "complete", "failed", "failed", "complete",
    ]  # fmt: skip
    notes = {
        cell.config["act"]: (tmp_path / cell.name / "error.txt").read_text()
        for cell in cells
        if not cell.config["act"].startswith("ok")
    }
    assert notes["fail-1"] == "number 1 is wrong\n\nTraceback ..."
    assert (
        notes["kill-1"] == "the process was ended by SIGKILL; its last words:\n\ndoing act=kill-1\n"
    )
    assert notes["exit-3"].startswith(
        "the process ended with exit code 3; its last words:\n\ndoing"
    )
    assert notes["exit-0"].startswith("the process ended with exit code 0")
    told = capsys.readouterr().err
    assert f"cell 1 of 7, {cells[0].name} act=fail-1: FAILED: number 1 is wrong (" in told
    assert f"cell 7 of 7, {cells[6].name} act=ok-3: done (" in told
    assert "4 cells failed" in told
    table = pq.read_table(tmp_path / "table.parquet").to_pylist()
    assert [row["act"] for row in table if row["state"] == "complete"] == ["ok-1", "ok-2", "ok-3"]
    assert not list(tmp_path.glob("*.running-*"))


@pytest.mark.usefixtures("acted")
@pytest.mark.parametrize(
    ("resume", "runs"),
    [("missing", ["ok-2"]), ("failed", ["fail-1", "ok-2"]), ("all", ["ok-1", "fail-1", "ok-2"])],
)
def test_what_runs_again(tmp_path, resume, runs):
    cells = acting("ok-1", "fail-1", "ok-2")
    assert sweep(tmp_path, cells[:2], resume="missing", runner=processes.processes(2)) == 1
    assert sorted(started(tmp_path)) == ["fail-1", "ok-1"]
    (tmp_path / "mended").write_text("")
    code = sweep(tmp_path, cells, resume=resume, runner=processes.processes(1))
    assert started(tmp_path) == runs
    assert code == (1 if resume == "missing" else 0)  # what failed before is still failed
    assert states(tmp_path, cells)[0::2] == ["complete", "complete"]
    assert states(tmp_path, cells)[1] == ("failed" if resume == "missing" else "complete")


@pytest.mark.usefixtures("acted")
def test_equal_cells_run_once(tmp_path):
    assert (
        sweep(tmp_path, acting("ok-1", "ok-1"), resume="missing", runner=processes.processes(2))
        == 0
    )
    assert started(tmp_path) == ["ok-1"]


@pytest.mark.usefixtures("acted")
def test_as_many_at_a_time_as_asked_for(tmp_path):
    """Each of the three waits until all have begun; with fewer at a time nothing would end."""
    cells = acting("wait-3", "wait-03", "wait-003")
    assert sweep(tmp_path, cells, resume="missing", runner=processes.processes(3)) == 0
    assert sorted(started(tmp_path)) == ["wait-003", "wait-03", "wait-3"]


def test_wrong_settings(tmp_path):
    with pytest.raises(ValueError, match="resume must be one of missing, failed, all, got 'some'"):
        sweep(tmp_path / "x", acting("ok"), resume="some", runner=processes.processes(1))
    assert not (tmp_path / "x").exists()
    for number in (0, 1025, "many", 1.5, True):
        with pytest.raises(ValueError, match="n_jobs must be an integer from 1 to 1024, got"):
            processes.processes(number)


SLEEPING = """
import signal
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_sweep import ACTING, acting
from paxserve.sweep import processes
from paxserve.sweep.run import sweep
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
processes.COMMAND = ACTING
cells = acting("ok-1", "sleep-1", "sleep-2", "ok-2")
sweep(Path(sys.argv[1]), cells, resume="missing", runner=processes.processes(2))
"""


def is_running(pid):
    """A child of a sweep that has ended may be a zombie that nobody has collected yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_our_own_processes_and_leaves_a_sweep(tmp_path, number):
    bystander = subprocess.Popen([*ACTING, str(tmp_path / "x" / "y"), "act=sleep"], stderr=-3)
    (tmp_path / "x").mkdir()
    code = SLEEPING.format(tests=str(Path(__file__).parent))
    path = tmp_path / "sweep"
    running = subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE)
    with running, bystander:
        file = path / "started.txt"
        while not (file.exists() and len(file.read_text().splitlines()) == 3):
            time.sleep(0.02)
        pids = [int(line.split()[1]) for line in file.read_text().splitlines()]
        running.send_signal(number)
        told = running.stderr.read().decode()
        assert running.wait() != 0
        assert "KeyboardInterrupt" in told
        assert not any(is_running(pid) for pid in pids)
        bystander.kill()
    cells = acting("ok-1", "sleep-1", "sleep-2", "ok-2")
    assert states(path, cells) == ["complete", "missing", "missing", "missing"]
    assert not list(path.glob("*.running-*"))


# Real cells.

SIZES = ("limits.max_model_len=32", "limits.num_blocks_override=9", "limits.max_num_seqs=4")
SYNTHETIC = (
    "workload=synthetic", "workload.num_requests=3", "workload.lengths.input_tokens=4",
    "workload.lengths.output_tokens=3",
)  # fmt: skip
REAL = ("run", "-m", "executor=scripted", *SIZES, *SYNTHETIC)


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_sweep_from_the_command_line(cli, tmp_path):
    """Two of three cells are wrong, each in its own way, and their tracebacks are kept."""
    path = tmp_path / "it's a sweep, (of=3)"
    blocks = "limits.num_blocks_override=9,1,0"
    code, out, err = cli(*REAL, blocks, "n_jobs=2", f'run_dir="{path}"')
    assert code == 1
    rows = pq.read_table(path / "table.parquet").to_pylist()
    cells = {row["limits.num_blocks_override"]: row for row in rows}
    assert [cells[n]["state"] for n in (9, 1, 0)] == ["complete", "failed", "failed"]
    assert (cells[9]["completed"], cells[1]["completed"]) == (3, None)
    note = (path / cells[1]["cell"] / "error.txt").read_text()
    assert note.startswith(
        "num_blocks_override must be an integer of at least 2, got 1\n\nTraceback"
    )
    assert "FAILED: num_blocks_override must be" in err
    config = yaml.safe_load((path / cells[9]["cell"] / "config.yaml").read_text())
    assert config["run_dir"] == str(path / cells[9]["cell"])
    assert "requests completed" in (path / cells[9]["cell"] / "log.txt").read_text()
    assert "3 cells" in out
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name}


def test_a_sweep_that_cannot_begin(cli, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("keep")
    code, _, err = cli(*REAL, "seed=0,1", "run_dir=other")
    assert (code, "holds no sweep" in err) == (2, True)
    code, _, err = cli(*REAL, "seed=0,1", "run_dir=new", "workload.lengths.input_tokens=???")
    assert (code, "workload.lengths.input_tokens must be set" in err) == (2, True)
    code, _, err = cli(*REAL, "seed=0,1", "run_dir=new", "n_jobs=0")
    assert (code, "n_jobs must be an integer from 1 to 1024, got 0" in err) == (2, True)
    code, _, err = cli(*REAL, "seed=0,1", "run_dir=new", "hydra.sweeper.max_batch_size=1")
    assert (code, "hydra.sweeper.max_batch_size=1: a sweep takes all its cells" in err) == (2, True)
    assert "Error executing job" not in err
    code, _, err = cli(*REAL, "seed=0,1", "run_dir=new", "resume=some")
    assert (code, "resume must be one of" in err) == (2, True)
    code, _, err = cli("run", "executor=scripted", "resume=all", "run_dir=new")
    assert (code, "resume" in err) == (1, True)
    assert not (tmp_path / "new").exists()


def test_a_policy_of_ones_own_in_a_sweep(cli, tmp_path):
    (tmp_path / "my_static.py").write_text(
        "from dataclasses import dataclass\n"
        "from paxserve.batching.static import Static\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Static):\n"
        "    number: int = 0\n"
    )
    code, _, err = cli(*REAL, "batching=my_static:Mine", "batching.number=1,2", "run_dir=own")
    assert code == 0, err
    rows = pq.read_table(tmp_path / "own" / "table.parquet").to_pylist()
    assert [row["batching.number"] for row in rows] == [1, 2]
    config = yaml.safe_load((tmp_path / "own" / rows[1]["cell"] / "config.yaml").read_text())
    assert config["choices"]["batching"] == "my_static:Mine"
    assert config["batching"]["number"] == 2


@pytest.mark.parametrize("where", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_configs_of_ones_own_in_a_sweep(cli, tmp_path, where):
    (tmp_path / "mine" / "limits").mkdir(parents=True)
    (tmp_path / "mine" / "limits" / "few.yaml").write_text("max_num_seqs: 3\nblock_size: 8\n")
    sizes = (*SYNTHETIC, "+limits.max_model_len=32", "+limits.num_blocks_override=9")
    code, _, err = cli(
        "run", "-m", "executor=scripted", where.format(tmp_path / "mine"), "limits=few", *sizes,
        "run_dir=own",
    )  # fmt: skip
    assert code == 0, err
    (row,) = pq.read_table(tmp_path / "own" / "table.parquet").to_pylist()
    config = yaml.safe_load((tmp_path / "own" / row["cell"] / "config.yaml").read_text())
    assert config["limits"]["max_num_seqs"] == 3


def test_a_cell_in_which_nothing_was_completed_has_failed(cli, tmp_path, monkeypatch):
    """And that is on disk before the marker: a sweep that is killed in between finds it failed."""
    changes = []
    monkeypatch.setattr(files, "boundary", lambda what, path: changes.append((what, path.name)))
    code, _, _ = cli("run", *REAL[2:], "workload.lengths.input_tokens=99", "run_dir=run")
    assert code == 1
    assert changes.index(("there", "error.txt")) < changes.index(("write", "complete"))
    code, _, err = cli(*REAL, "workload.lengths.input_tokens=4,99", "run_dir=sweep")
    assert code == 1
    assert "FAILED: no request was completed: " in err
    assert "refused, the first because the prompt has 99 tokens" in err
    rows = pq.read_table(tmp_path / "sweep" / "table.parquet").to_pylist()
    assert [row["state"] for row in rows] == ["complete", "failed"]
    assert (tmp_path / "sweep" / rows[1]["cell"] / "outputs.jsonl").is_file()


def test_a_cell_ends_with_a_sweep_that_is_killed(tmp_path):
    """Nobody is there to end it, and a second sweep goes on at once."""
    command = [sys.executable, "-m", "paxserve", *REAL, "seed=0", f"run_dir={tmp_path}"]
    slow = [*command, "workload.num_requests=100000", "limits.num_blocks_override=9"]
    running = subprocess.Popen(slow, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("*.running-*/log.txt")):
        time.sleep(0.02)
    running.kill()
    running.wait()
    done = subprocess.run(
        [*command, "workload.num_requests=2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    left = SweepDirectory.read(tmp_path)
    assert [left.state(cell) for cell in left.cells()] == [State.MISSING, State.COMPLETE]
    assert not list(tmp_path.glob("*.running-*"))
