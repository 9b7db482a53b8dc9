"""Every study, small: it runs to its end, and its tables and pictures say something."""

import os
from pathlib import Path

import pytest

from experiments.study.cells import Cells
from experiments.study.door import Setting
from paxserve.claims import Scale

DATA = Path(os.environ["PAXSERVE_DATA"]) if "PAXSERVE_DATA" in os.environ else None

needs_data = pytest.mark.skipif(DATA is None, reason="PAXSERVE_DATA is not set")


@pytest.fixture
def setting(tmp_path):
    return Setting(scale=Scale(fast=True, data=DATA), cells=Cells(folder=tmp_path / "cells"))


def numbers(table, column):
    """A column of a table, by the words of its header, as numbers."""
    header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    return [float(row[header.index(column)]) for row in rows]


@needs_data
def test_vllm_fig12(setting):
    from experiments.vllm_fig12.run import study

    findings = study(setting)
    knees = numbers(findings.tables["knees"], "measured")
    assert len(knees) == 2
    assert knees[0] > 2 * knees[1] > 0  # vLLM, Orca Max
    assert "Holds.** The order of the systems" in findings.tables["verdict"]
    assert len(findings.pictures["figure12"].axes) == 1


@needs_data
def test_roofline_vidur(setting):
    from experiments.roofline_vidur.run import study

    findings = study(setting)
    steps, verdict = findings.tables["steps"], findings.tables["verdict"]
    measured, modelled = numbers(steps, "measured, ms"), numbers(steps, "modelled, ms")
    assert len(measured) == 10
    # Vidur's files, by eye: Llama-3-8B on an A100 at 64 and 128 tokens.
    assert (measured[1], measured[2]) == (11.3, 13.3)
    for one, other, ratio in zip(measured, modelled, numbers(steps, "ratio"), strict=True):
        assert ratio == pytest.approx(other / one, abs=0.01)
    assert verdict.startswith("- **Does not hold.** Few tokens")
    assert "0 of 6 are within 10%" in verdict
    assert len(findings.pictures["ratios"].axes) == 1
