"""What studies have in common: cells that are kept, tables between markers, published curves."""

import importlib
import json
import sys

import pytest

from experiments.study.cells import PACKAGE, Cells, each, file_digest, sources_digest
from experiments.study.published import curve, value
from experiments.study.readme import ratio, refresh, table
from paxserve.claims.knees import Point

CELL = [
    "executor=scripted", "workload=synthetic", "workload.num_requests=3",
    "limits.max_model_len=256", "limits.num_blocks_override=65",
]  # fmt: skip


@pytest.fixture
def counted(monkeypatch):
    """A measurement that counts how often it was made."""
    made = []

    def measure(overrides):
        made.append(overrides)
        return {"number": len(made), "seed": overrides[-1]}

    measure.made = made
    return measure


def cells(tmp_path, **settings):
    return Cells(folder=tmp_path / "cells", **settings)


def test_a_cell_is_run_once(tmp_path, counted):
    first = cells(tmp_path).kept(counted, CELL)
    assert cells(tmp_path).kept(counted, CELL) == first == {"number": 1, "seed": CELL[-1]}
    (path,) = (tmp_path / "cells").iterdir()
    assert json.loads(path.read_text())["overrides"] == CELL
    # Spelled otherwise it is the same cell; with anything else set, another.
    assert cells(tmp_path).kept(counted, [*CELL, "limits.block_size=16"])["number"] == 1
    assert cells(tmp_path).kept(counted, [*CELL, "limits.block_size=8"])["number"] == 2
    assert cells(tmp_path).kept(counted, [*CELL, "seed=5"])["number"] == 3
    assert cells(tmp_path, version="other code").kept(counted, CELL)["number"] == 4
    assert cells(tmp_path, is_fresh=True).kept(counted, CELL)["number"] == 5
    assert cells(tmp_path).kept(counted, CELL)["number"] == 5


def test_a_cell_of_other_data_is_another(tmp_path, counted):
    trace = tmp_path / "trace.jsonl"
    cell = ["workload=jsonl", f"workload.path={trace}"]
    for text, number in (("{}", 1), ("{ }", 2), ("{}", 1)):
        trace.write_text(text)
        file_digest.cache_clear()
        assert cells(tmp_path).kept(counted, cell)["number"] == number


def test_a_cell_measured_by_other_code_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # both have one size and second
    for text, number in (("1", 1), ("2", 2)):
        (tmp_path / "measured_so.py").write_text(f"def measure(overrides):\n    return {text}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "measured_so", raising=False)
        importlib.invalidate_caches()
        file_digest.cache_clear()
        measure = importlib.import_module("measured_so").measure
        assert cells(tmp_path).kept(measure, CELL) == number


def test_a_cell_is_a_run_of_the_engine(tmp_path):
    found = cells(tmp_path).run(CELL)
    assert found["completed"] == 3
    assert cells(tmp_path).run(CELL) == found


def test_a_cell_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="max_model_len"):
        cells(tmp_path).run([*CELL, "limits.max_model_len=null"])
    assert not (tmp_path / "cells").exists()


def test_the_version_is_that_of_the_simulated_code(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "engine.py").write_text("a = 1\n")
    (tmp_path / "claims" / "row.py").write_text("b = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "claims" / "row.py").write_text("b = 2\n")
    assert sources_digest(tmp_path) == before
    (tmp_path / "engine.py").write_text("a = 2\n")
    assert sources_digest(tmp_path) != before
    assert sources_digest(PACKAGE) == sources_digest(PACKAGE)


def square(number):
    return number * number


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_in_order(num_processes):
    assert each(square, [3, 1, 2], num_processes=num_processes, what="squares") == [9, 1, 4]


def test_no_more_processes_than_allowed():
    with pytest.raises(ValueError, match="processes must be 1 to 2, got 3"):
        each(square, [1], num_processes=3, what="squares")


def test_tables_stand_between_their_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# One\n\n<!-- a -->\nold\n<!-- /a -->\n\ntext\n<!-- b -->\n<!-- /b -->\nend\n")
    refresh(path, {"a": "new\nlines", "b": "more"})
    expected = (
        "# One\n\n<!-- a -->\nnew\nlines\n<!-- /a -->\n\ntext\n<!-- b -->\nmore\n<!-- /b -->\nend\n"
    )
    assert path.read_text() == expected
    refresh(path, {"a": "new\nlines"})
    assert path.read_text() == expected
    with pytest.raises(ValueError, match="has no lines <!-- c -->"):
        refresh(path, {"c": "x"})


def test_a_table():
    rows = [["a", 1.23456, None], ["b", 12345.6, 7]]
    assert table(["x", "y", "z"], rows).splitlines() == [
        "| x | y | z |",
        "| --- | --- | --- |",
        "| a | 1.23 | - |",
        "| b | 12346 | 7 |",
    ]
    assert [ratio(3, 4), ratio(None, 4), ratio(3, None)] == ["0.75", "-", "-"]


def test_published_curves(tmp_path):
    (tmp_path / "published_curves.csv").write_text(
        "paper,figure,panel,series,x,x_unit,y,y_unit,how\n"
        "P,1,a: one,s,2,r,0.5,t,read\nP,1,a: one,s,1,r,0.25,t,read\nP,2,bars,u,,,7.5,%,printed\n"
    )
    wanted = {"paper": "P", "figure": "1", "panel": "a", "series": "s"}
    assert curve(tmp_path, **wanted) == [Point(1.0, 0.25), Point(2.0, 0.5)]
    with pytest.raises(ValueError, match="no curve 's' in panel 'b'"):
        curve(tmp_path, **{**wanted, "panel": "b"})
    assert value(tmp_path, paper="P", figure="2", panel="bars", series="u") == 7.5
    with pytest.raises(ValueError, match="2 numbers 's'"):
        value(tmp_path, paper="P", figure="1", panel="a: one", series="s")
