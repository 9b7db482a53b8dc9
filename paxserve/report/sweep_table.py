"""A sweep on the terminal.

Owns: which of its figures are shown, and how many cells. In: the table of a sweep. Out: a table on
a console. Must not know: how it was made.
"""

from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from paxserve.report.table import cell_text
from paxserve.sweep.table import CELL, STATE, axes_in
from paxserve.terminal import table_console

MOST_ROWS = 60
_FIGURES = (
    ("tokens/s", "output_throughput", "{:.1f}"),
    ("TTFT, ms", "mean_ttft_ms", "{:.0f}"),
    ("TPOT, ms", "mean_tpot_ms", "{:.0f}"),
    ("ITL p99, ms", "p99_itl_ms", "{:.0f}"),
    ("running", "mean_running_requests", "{:.1f}"),
)


def print_sweep(table: pa.Table, *, console: Console | None = None) -> None:
    """A line per cell: its name, what sets it apart, and mean figures or its state."""
    axes = axes_in(table)
    drawn = Table(title=f"{table.num_rows} cells", title_justify="left")
    drawn.add_column(CELL, no_wrap=True)
    for heading in _headings(axes):
        drawn.add_column(heading)
    for label, _, _ in _FIGURES:
        drawn.add_column(label, justify="right")
    for row in table.slice(0, MOST_ROWS).to_pylist():
        figures = [cell_text(row.get(key), form) for _, key, form in _FIGURES]
        if row[STATE] != "complete":
            figures = [row[STATE]]
        drawn.add_row(row[CELL], *[_axis_text(row[axis]) for axis in axes], *figures)
    console = console or table_console()
    console.print(drawn)
    if table.num_rows > MOST_ROWS:
        console.print(f"... and {table.num_rows - MOST_ROWS} more")


def _headings(axes: list[str]) -> list[str]:
    """The last word of each key, if no other has the same."""
    last = [axis.rpartition(".")[2] for axis in axes]
    return [word if last.count(word) == 1 else axis for word, axis in zip(last, axes, strict=True)]


def _axis_text(value: Any) -> str:
    return "-" if value is None else str(value)
