"""Records as Arrow tables, a chunk at a time, and how they become Parquet files.

Owns: the schema of a record type, and that no more than a chunk is ever held as Python objects. In:
NamedTuples. Out: record batches, files. Must not know: what the records mean.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import batched
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paxserve.files import whole

CHUNK = 4096  # records
GROUP = 16  # chunks that are written, and so read, together


def schema_of(
    record: type, *, without: Sequence[str] = (), more: Mapping[str, type] | None = None
) -> pa.Schema:
    """The record's fields and their types, whatever the records hold."""
    hints = {**get_type_hints(record), **(more or {})}
    return pa.schema([(k, _arrow_type(hint)) for k, hint in hints.items() if k not in without])


def batches_of(records: Iterable[Sequence[Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Records whose fields are those of the schema, in its order."""
    for chunk in batched(records, CHUNK):
        columns = zip(zip(*chunk, strict=True), schema.types, strict=True)
        yield pa.RecordBatch.from_arrays(
            [pa.array(values, type) for values, type in columns], schema=schema
        )


class GrowingTable:
    """A table to which records are added; all but the last of them lie in Arrow's memory."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._last: list[Sequence[Any]] = []

    def add(self, record: Sequence[Any]) -> None:
        """One more record."""
        self._last.append(record)
        if len(self._last) == CHUNK:
            self._pack()

    def table(self) -> pa.Table:
        """All records so far."""
        self._pack()
        return pa.Table.from_batches(self._batches, schema=self._schema)

    def _pack(self) -> None:
        self._batches += batches_of(self._last, self._schema)
        self._last.clear()


def write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """A Parquet file of these batches, whole or not there."""
    with whole(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for group in batched(batches, GROUP):
            writer.write_table(pa.Table.from_batches(group, schema=schema))


def numpy_column(column: pa.ChunkedArray) -> np.ndarray:
    """Numbers as f64, NaN where there is none; texts as objects."""
    values: np.ndarray = column.to_numpy()
    return values if values.dtype == object else values.astype(np.float64)


def _arrow_type(hint: Any) -> pa.DataType:
    if get_origin(hint) is tuple:
        return pa.list_(_arrow_type(get_args(hint)[0]))
    known = [one for one in (get_args(hint) or (hint,)) if one is not type(None)]
    for python, arrow in ((int, pa.int64()), (float, pa.float64()), (str, pa.string())):
        if issubclass(known[0], python):
            return arrow
    raise TypeError(f"no Arrow type for {hint}")
