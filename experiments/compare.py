"""`python experiments/compare.py SWEEP`: the tidy table of a sweep, and its standard pictures.

Figures against the numeric axis that was swept, a line per policy, their spread over seeds; with
--baseline also paired differences: each policy's figure less the baseline's with the same seed.
Everything is written beside the sweep's table, and made anew from what is on disk.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import csv
from rich.table import Table

from paxserve.files import write_arrow, write_text
from paxserve.report.comparison import draw_differences, draw_means
from paxserve.sweep.comparison import Comparison, Difference, Mean, spread_name
from paxserve.sweep.directory import SweepDirectory
from paxserve.sweep.table import STATE, write_sweep_table
from paxserve.terminal import table_console, while_read


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP", help="run_dir of a `paxserve run -m`")
    parser.add_argument("--by", metavar="KEY", help=_BY)
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help=_METRIC)
    parser.add_argument("--baseline", metavar="CELL", help=_BASELINE)
    arguments = parser.parse_args(argv)
    try:
        for written in compare(arguments.sweep, arguments.by, arguments.metric, arguments.baseline):
            print(written)
    except ValueError as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 2
    return 0


_BY = "the numeric axis to draw against; needed if there are several"
_METRIC = "a figure of summary.json; may be given again"
_BASELINE = "a cell's name, or KEY=VALUE,...: the policy that the others are compared with"


def compare(path: Path, by: str | None, metrics: Sequence[str], baseline: str | None) -> list[Path]:
    """Write tables and pictures.

    Raises:
        ValueError: no sweep, or as of `Comparison`.
    """
    table = write_sweep_table(SweepDirectory.read(path))
    comparison = Comparison.of(table, by=by, metrics=metrics)
    if comparison.num_missing:
        states = sorted({state for state in table[STATE].to_pylist() if state != "complete"})
        num_lost, num_cells = comparison.num_missing, comparison.num_cells
        print(f"without {num_lost} of {num_cells} cells: {', '.join(states)}")
    written = [path / "table.csv", *_write(path / "means", comparison.means())]
    draw_means(comparison).save(path / "means.png")
    written.append(path / "means.png")
    if baseline is not None:
        rows = comparison.differences(comparison.baseline(baseline))
        if not rows:
            raise ValueError(f"no other policy has a seed in common with {baseline}")
        _print_differences(rows, comparison.by)
        written += _write(path / "differences", rows)
        draw_differences(comparison, rows).save(path / "differences.png")
        written.append(path / "differences.png")
    return written


def _write(path: Path, rows: Sequence[Mean] | Sequence[Difference]) -> list[Path]:
    table = pa.Table.from_pylist([row._asdict() for row in rows])
    text = pa.BufferOutputStream()
    csv.write_csv(table, text)
    files = [path.with_suffix(".parquet"), path.with_suffix(".csv")]
    write_arrow(files[0], table)
    write_text(files[1], text.getvalue().to_pybytes().decode())
    return files


def _print_differences(rows: Sequence[Difference], by: str | None) -> None:
    table = Table(title=f"less {rows[0].baseline}, paired by seed", title_justify="left")
    for heading in (
        "policy",
        (by or "").rpartition(".")[2],
        "metric",
        f"mean ({spread_name(row.num_seeds for row in rows) or 'one seed'})",
        "lower",
    ):
        table.add_column(heading)
    for row in rows:
        interval = "" if row.low is None else f" ({row.low:+.3g} to {row.high:+.3g})"
        place = "" if row.by is None else f"{row.by:g}"
        share = f"{row.share_lower * row.num_seeds:.0f} of {row.num_seeds}"
        table.add_row(row.policy, place, row.metric, f"{row.mean:+.3g}{interval}", share)
    table_console().print(table)


if __name__ == "__main__":
    sys.exit(while_read(main))
