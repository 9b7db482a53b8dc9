"""The notebooks run from top to bottom, say what their text says, and are in step with scripts."""

import json
import runpy
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from axes import ROOT

from paxserve.report.style import Picture

FOLDER = ROOT / "experiments" / "notebooks"
SPEC = spec_from_file_location("pair", FOLDER / "pair.py")
pair = module_from_spec(SPEC)
SPEC.loader.exec_module(pair)


def test_every_script_has_its_notebook_and_the_other_way_round():
    names = [script.stem for script in pair.scripts()]
    assert names == ["first_tour", "new_policy_in_one_cell"]
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == names


@pytest.mark.parametrize("script", pair.scripts(), ids=lambda path: path.stem)
def test_a_notebook_is_in_step_with_its_script(script):
    """Run `python experiments/notebooks/pair.py` when this fails."""
    assert script.with_suffix(".ipynb").read_text(encoding="utf-8") == pair.text(script)


@pytest.mark.parametrize("script", pair.scripts(), ids=lambda path: path.stem)
def test_no_line_of_a_script_is_lost(script):
    cells = json.loads(pair.text(script))["cells"]
    lines = [line.rstrip("\n") for cell in cells for line in cell["source"]]
    source = script.read_text(encoding="utf-8").split("\n")
    code = [line for line in source if line and not line.startswith("#")]
    assert [line for line in lines if line in set(code) and line] == code
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}
    assert all(cell["source"][0].startswith("# ") for cell in cells[:1])


def run(name):
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def test_the_first_tour():
    found = run("first_tour")
    table = found["both"].table
    assert found["result"].summary["completed"] == 60
    assert table.loc["continuous", "duration"] < table.loc["static", "duration"]
    assert table.loc["continuous", "mean_ttft_ms"] < table.loc["static", "mean_ttft_ms"]
    assert found["classes"].sum(axis=1).unique().tolist() == [49 * 16]
    assert len(found["held_back"]) > 0
    assert found["num_different"] == 0
    assert found["trace"].exists()
    assert isinstance(found["both"].plot_timeline(), Picture)


def test_a_new_policy_in_one_cell():
    found = run("new_policy_in_one_cell")
    table, ttft_s = found["table"], found["ttft_s"]
    fcfs, zero, largest = "fcfs", "0 s per token", "10 s per token"
    assert table.loc[zero].equals(table.loc[fcfs])
    assert table["median_ttft_ms"].is_monotonic_decreasing
    assert table["p99_ttft_ms"].is_monotonic_increasing
    assert ttft_s.loc[largest, False] < ttft_s.loc[fcfs, False]
    assert ttft_s.loc[largest, True] > ttft_s.loc[fcfs, True]
