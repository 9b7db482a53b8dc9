"""The command line of every study, and what becomes of its findings.

Owns: `--fast`, `--processes`, `--data`, `--cells`, `--fresh`. In: a function that studies. Out:
tables on the terminal; in a full run the tables of the README and the pictures beside it.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.study.cells import MOST_PROCESSES, Cells
from experiments.study.readme import refresh
from paxserve.claims import Missing, Scale
from paxserve.report.style import Picture

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a study is run: small or whole, where its data lie, how many processes, its cells."""

    scale: Scale
    cells: Cells
    num_processes: int = 1

    @property
    def data(self) -> Path:
        """The folder of reference data.

        Raises:
            Missing: nobody said where it is.
        """
        if self.scale.data is None:
            raise Missing("set PAXSERVE_DATA, or give --data DIR")
        return self.scale.data


@dataclass(frozen=True, slots=True)
class Findings:
    """Tables by the name of their markers, pictures by the name of their files."""

    tables: Mapping[str, str]
    pictures: Mapping[str, Picture] = field(default_factory=dict)


def main(run_file: str, study: Callable[[Setting], Findings], *, doc: str | None) -> None:
    """Run a study from the command line.

    Args:
        run_file: the study's `run.py`; its README and pictures lie beside it.
        study: makes the findings.
        doc: what the command does.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="small samples; nothing is written")
    parser.add_argument("--processes", type=int, default=1, help=f"1 to {MOST_PROCESSES}")
    parser.add_argument("--data", type=Path, help="reference data (default: PAXSERVE_DATA)")
    parser.add_argument("--cells", type=Path, default=ROOT / "runs" / "studies", help="kept cells")
    parser.add_argument("--fresh", action="store_true", help="run cells that are there, too")
    given = parser.parse_args()
    data = given.data or os.environ.get("PAXSERVE_DATA")
    setting = Setting(
        scale=Scale(fast=given.fast, data=None if data is None else Path(data)),
        cells=Cells(folder=given.cells, is_fresh=given.fresh),
        num_processes=given.processes,
    )
    findings = study(setting)
    for name, table in findings.tables.items():
        print(f"\n{name}\n{table}")
    if given.fast:
        return
    folder = Path(run_file).parent
    for name, picture in findings.pictures.items():
        picture.save(folder / f"{name}.png")
    refresh(folder / "README.md", findings.tables)
