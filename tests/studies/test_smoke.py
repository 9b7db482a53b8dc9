"""Every study, small: it runs to its end, and its tables say what one knows beforehand."""

import importlib
import os
import re
from pathlib import Path

import pytest
from axes import ROOT

from experiments.study.cells import Cells
from experiments.study.door import Setting
from experiments.study.readme import refresh
from paxserve.claims import Scale

DATA = Path(os.environ["PAXSERVE_DATA"]) if "PAXSERVE_DATA" in os.environ else None
STUDIES = sorted(
    path.parent.name
    for path in (ROOT / "experiments").glob("*/run.py")
    if "experiments.study.door" in path.read_text(encoding="utf-8")
)

needs_data = pytest.mark.skipif(DATA is None, reason="PAXSERVE_DATA is not set")


@pytest.fixture
def found(tmp_path):
    """The tables of a study, all of which have their place in its README."""

    def run(name):
        study = importlib.import_module(f"experiments.{name}.run").study
        cells = Cells(folder=tmp_path / "cells")
        findings = study(Setting(scale=Scale(fast=True, data=DATA), cells=cells))
        for picture in findings.pictures.values():
            assert picture.axes
        readme = tmp_path / "README.md"
        readme.write_bytes((ROOT / "experiments" / name / "README.md").read_bytes())
        refresh(readme, findings.tables)
        return findings.tables

    return run


def rows_of(table):
    """Rows by header."""
    header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def column(table, name):
    """Numbers of a column."""
    return [float(row[name].removesuffix(" %")) for row in rows_of(table)]


@needs_data
def test_vllm_fig12(found):
    tables = found("vllm_fig12")
    vllm, orca_max = column(tables["knees"], "measured")
    assert vllm > 2 * orca_max > 0
    assert "Holds.** The order of the systems" in tables["verdict"]


@needs_data
def test_roofline_vidur(found):
    tables = found("roofline_vidur")
    steps = tables["steps"]
    measured, modelled = column(steps, "measured, ms"), column(steps, "modelled, ms")
    assert len(measured) == 10
    # Vidur's files, by eye: Llama-3-8B on an A100 at 64 and 128 tokens.
    assert (measured[1], measured[2]) == (11.3, 13.3)
    for one, other, ratio in zip(measured, modelled, column(steps, "ratio"), strict=True):
        assert ratio == pytest.approx(other / one, abs=0.01)
    assert tables["verdict"].startswith("- **Does not hold.** Few tokens")
    assert "0 of 6 are within 10%" in tables["verdict"]


@needs_data
def test_vllm_fig13(found):
    sizes = {(row["run"].split()[1], row["system"]): float(row["measured"])
             for row in rows_of(found("vllm_fig13")["sizes"])}  # fmt: skip
    for data in ("ShareGPT", "Alpaca"):
        names = ("Orca Max", "Orca Pow2", "Orca Oracle", "vLLM")
        order = [sizes[data, name] for name in names]
        assert order == sorted(order)
        assert order[0] <= 7


def test_prefill_stall(found):
    tables = found("prefill_stall")
    whole, mixed = column(tables["budgets"], "longest gap, ms")
    assert whole > 3 * mixed
    assert "Holds" in tables["verdict"]


def test_five_flags(found):
    tables = found("five_flags")
    assert tables["verdict"].count("**Holds.**") == 2
    few, *_, many = column(tables["figures"], "running")[:3]
    assert few < many


def test_fragmentation(found):
    tables = found("fragmentation")
    assert "Holds" in tables["verdict"]
    stages = rows_of(tables["stages"])
    young, old = (
        float(stage["largest free run"]) / float(stage["free slots"])
        for stage in (stages[0], stages[3])
    )
    assert old < 0.7 * young  # much is free, in small pieces
    assert {stage["largest free run"] for stage in stages[4:]} == {"-"}


def test_prefix_sharing(found):
    tables = found("prefix_sharing")
    assert "Holds" in tables["verdict"]
    none, chain, radix = column(tables["rates"], "computed tokens")
    assert none > 40 * 1200
    assert none > 3 * chain
    assert chain == radix


def test_orca_fig10(found):
    orca, *_, level, _, _ = rows_of(found("orca_fig10")["knees"])
    assert float(orca["measured"]) > 10 * float(level["measured"])


@needs_data
def test_vllm_fig14(found):
    tables = found("vllm_fig14")
    vllm, pow2 = column(tables["knees"], "measured")
    assert vllm > 1.5 * pow2
    assert 2 < column(tables["saved"], "measured, %")[0] < 15


@needs_data
def test_vllm_fig17(found):
    vllm, orca_max = [
        float(line.split("|")[3]) for line in found("vllm_fig17")["knees"].splitlines()[2:]
    ]
    assert vllm > orca_max


@needs_data
def test_vllm_fig18(found):
    tables = found("vllm_fig18")
    assert column(tables["sizes"], "tails, % of KV") == sorted(
        column(tables["sizes"], "tails, % of KV")
    )
    assert len(rows_of(tables["watermarks"])) == 2


def test_sarathi_capacity(found):
    vllm, sarathi = column(found("sarathi_capacity")["capacities"], "requests/s")
    assert sarathi > vllm


def test_vtc_fairness(found):
    tables = found("vtc_fairness")
    by_order = {(row["order"], row["figure"][:19]): row["measured"]
                for row in rows_of(tables["clients"])}  # fmt: skip
    light = [float(by_order[order, "TTFT of who asks le"]) for order in ("FCFS", "VTC")]
    assert light[1] < light[0]


@needs_data
def test_length_prediction(found):
    first, true, classes = column(found("length_prediction")["orders"], "s/token, mean")
    assert true < classes < first


@needs_data
def test_real_traces(found):
    tables = found("real_traces")
    small, large = column(tables["mooncake"], "hit rate, %")
    assert 0 < small <= large < 60
    assert len(rows_of(tables["azure"])) == 2


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_what_it_is(name):
    """Question, command, conclusion; no table that was never filled; pictures that are there."""
    folder = ROOT / "experiments" / name
    text = (folder / "README.md").read_text(encoding="utf-8")
    for word in ("**Question.**", "**Command.**", "**Conclusion.**"):
        assert word in text
    assert not re.search(r"<!-- (\w+) -->\n<!-- /\1 -->", text)
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert 1000 < (folder / picture).stat().st_size < 200_000
