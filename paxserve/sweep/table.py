"""The table of a sweep: a row per cell, a column per axis and figure.

Owns: which columns and rows there are, their types and order. In: what is on disk, and nothing
else, so that a sweep in several goes has the table of one. Out: a table, two files. Must not know:
how cells run.

| column | |
|---|---|
| cell | the name of its directory |
| one per axis | what somebody set and not all cells have alike, such as `batching` or `seed` |
| state | complete, failed, missing; the figures of the last two are empty |
| one per figure | of summary.json |
"""

import io
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyarrow import csv

from paxserve.files import write_arrow, write_text
from paxserve.sweep.cell import axes_of, value_of
from paxserve.sweep.directory import State, SweepDirectory

TABLE = "table.parquet"
CSV = "table.csv"
CELL, STATE = "cell", "state"

type Row = dict[str, Any]


def write_sweep_table(directory: SweepDirectory) -> pa.Table:
    """Make the table, and write it into the sweep's directory, as Parquet and as CSV."""
    table = sweep_table(directory)
    text = io.BytesIO()
    csv.write_csv(table, text)
    write_arrow(directory.path / TABLE, table)
    write_text(directory.path / CSV, text.getvalue().decode())
    return table


def sweep_table(directory: SweepDirectory) -> pa.Table:
    """The table; its schema's metadata says which columns are axes."""
    cells = directory.cells()
    axes = axes_of(cells)
    states = {cell.name: directory.state(cell) for cell in cells}
    rows = [
        {
            CELL: cell.name,
            **{axis: value_of(cell.config, axis) for axis in axes},
            STATE: str(states[cell.name]),
            **(_figures(directory, cell.name) if states[cell.name] is State.COMPLETE else {}),
        }
        for cell in cells
    ]
    rows.sort(key=lambda row: ([_rank(row[axis]) for axis in axes], row[CELL]))
    names = dict.fromkeys((CELL, *axes, STATE, *(name for row in rows for name in row)))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    return pa.table(columns).replace_schema_metadata({"axes": json.dumps(axes)})


def axes_in(table: pa.Table) -> list[str]:
    """The columns of a table of a sweep that are axes."""
    found: list[str] = json.loads((table.schema.metadata or {}).get(b"axes", b"[]"))
    return found


def _figures(directory: SweepDirectory, name: str) -> Row:
    found: Row = json.loads((directory.path / name / "summary.json").read_text(encoding="utf-8"))
    return found


def _rank(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then words, then nothing."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, _word(value))


def _column(values: Sequence[Any]) -> pa.Array:
    """Of one type: numbers stay numbers if all are."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int}:
        return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        return pa.array(values, pa.float64())
    return pa.array([None if value is None else _word(value) for value in values], pa.string())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
