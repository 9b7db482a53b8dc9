"""What a tracker is told, by one that writes it down; and what TensorBoard finds."""

import json
import struct
import sys
from itertools import pairwise

import pyarrow.parquet as pq
import pytest

import paxserve
from paxserve.cli import main
from paxserve.tracker.tensorboard import TensorBoard

RECORDER = """
import json
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class Recorder:
    file: str = "told.jsonl"
    every_s: float = 0.0

    def on_start(self, config, path):
        told = Told(self.file)
        told.write("start", config=config, path=str(path), exists=Path(path).is_dir())
        return told

class Told:
    def __init__(self, file):
        self.file = file

    def write(self, kind, **more):
        with open(self.file, "a") as file:
            file.write(json.dumps({"kind": kind, **more}) + "\\n")

    def on_figures(self, step, time_s, figures):
        self.write("figures", step=step, time_s=time_s, figures=figures)

    def on_end(self, summary):
        self.write("end", summary=summary)
"""
RUN = (
    "run", "executor=scripted", "limits.max_model_len=64", "limits.num_blocks_override=9",
    "workload=synthetic", "workload.num_requests=6", "workload.lengths.input_tokens=8",
    "workload.lengths.output_tokens=5",
)  # fmt: skip


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What was told, after a run."""
    (tmp_path / "my_recorder.py").write_text(RECORDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["paxserve"])

    def read():
        lines = (tmp_path / "told.jsonl").read_text().splitlines()
        (tmp_path / "told.jsonl").unlink()
        return [json.loads(line) for line in lines]

    yield read
    sys.modules.pop("my_recorder", None)


def test_a_tracker_is_told_of_every_step(told, tmp_path):
    assert main([*RUN, "tracker=my_recorder:Recorder", "run_dir=run"]) == 0
    start, *figures, end = told()
    assert (start["kind"], start["path"], start["exists"]) == ("start", "run", True)
    assert start["config"]["choices"]["executor"] == "scripted"
    assert start["config"]["workload"]["num_requests"] == 6
    assert end == {
        "kind": "end",
        "summary": json.loads((tmp_path / "run/summary.json").read_text()),
    }
    steps = pq.read_table(tmp_path / "run" / "steps.parquet").to_pylist()
    assert [one["step"] for one in figures] == [step["step_id"] for step in steps]
    for one, step in zip(figures, steps, strict=True):
        assert one["time_s"] == step["start_s"] + step["duration_s"]
        assert one["figures"] == {
            "num_running": step["num_running"],
            "num_waiting": step["num_waiting"],
            "num_ended": one["figures"]["num_ended"],
            "kv_used_share": step["num_used_blocks"] / 8,
            "step_time_ms": 1000 * step["duration_s"],
            "tokens_per_s": step["num_tokens"] / step["duration_s"],
        }
    ended = [one["figures"]["num_ended"] for one in figures]
    assert ended == sorted(ended)
    assert ended[-1] == 6


def test_not_more_often_than_it_asks_for(told):
    own = ("tracker=my_recorder:Recorder", "tracker.every_s=3.5")
    assert main([*RUN, *own, "run_dir=run"]) == 0
    _, *figures, _ = told()
    times = [one["time_s"] for one in figures]
    assert len(times) > 2
    assert min(later - one for one, later in pairwise(times)) >= 3.5
    # All tokens are counted, those of the steps in between too.
    assert all(one["figures"]["tokens_per_s"] > 0 for one in figures)


def test_the_end_of_a_failed_run_is_told(told):
    wrong = ("limits.num_blocks_override=1", "tracker=my_recorder:Recorder", "run_dir=run")
    assert main([*RUN, *wrong]) == 2
    assert [(one["kind"], one.get("summary")) for one in told()] == [("start", None), ("end", None)]


def test_a_tracker_of_a_notebook(told, tmp_path):
    result = paxserve.run([*RUN[1:], "tracker=my_recorder:Recorder"])
    kinds = [one["kind"] for one in told()]
    assert (kinds[0], kinds[-1], len(kinds)) == ("start", "end", len(result.steps) + 2)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+tracker.every_s=3", "tracker=none does not read every_s"),
        ("tracker=my_recorder:Nobody", "tracker=my_recorder:Nobody cannot be imported"),
        ("tracker=nobody", "Could not find 'tracker/nobody'"),
    ],
)
def test_wrong_settings(told, capsys, override, words):
    try:
        code = main([*RUN, override, "run_dir=run"])
    except SystemExit as stop:
        code = stop.code
    assert code in (1, 2)
    assert words in capsys.readouterr().err


def test_a_missing_writer_says_what_to_install(told, capsys, monkeypatch):
    monkeypatch.setattr("paxserve.tracker.tensorboard._WRITER", "no_such_writer")
    assert main([*RUN, "tracker=tensorboard", "run_dir=run"]) == 2
    assert "needs no_such_writer: pip install 'paxserve[tensorboard]'" in capsys.readouterr().err


def test_the_pace_is_checked():
    with pytest.raises(ValueError, match="every_s must be a number"):
        TensorBoard(every_s=-1)


def test_tensorboard_finds_the_curves(told, tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra `tensorboard` is not installed")
    from tensorboardX.proto.event_pb2 import Event

    assert main([*RUN, "tracker=tensorboard", "tracker.every_s=0", "run_dir=run"]) == 0
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    data, curves = file.read_bytes(), {}
    while data:  # length, checksum, record, checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            curves.setdefault(value.tag, []).append((event.wall_time, value.simple_value))
    steps = pq.read_table(tmp_path / "run" / "steps.parquet").to_pylist()
    assert curves["num_running"] == [
        (step["start_s"] + step["duration_s"], step["num_running"]) for step in steps
    ]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [value for _, value in curves["summary/completed"]] == [summary["completed"]]
    assert any(tag.startswith("config") for tag in curves)
