"""Records as Arrow tables: as they were put in, across chunks, and not held twice."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paxserve import tables
from paxserve.tables import GrowingTable, batches_of, numpy_column, schema_of, write_batches


class Record(NamedTuple):
    name: str
    size: int
    time_s: float | None
    parts: tuple[int, ...]


RECORDS = [Record(f"r{i}", i, None if i % 4 == 0 else i / 8, (i,) * (i % 3)) for i in range(11)]
ROWS = [{**record._asdict(), "parts": list(record.parts)} for record in RECORDS]


@pytest.fixture(autouse=True)
def chunk_of_three(monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", 3)
    monkeypatch.setattr(tables, "GROUP", 2)


def test_a_table_grows_by_chunks_and_can_be_looked_at_meanwhile():
    growing = GrowingTable(schema_of(Record))
    for number, record in enumerate(RECORDS):
        growing.add(record)
        assert len(growing._last) < tables.CHUNK
        if number in (1, 6):
            assert growing.table().to_pylist() == ROWS[: number + 1]
    assert growing.table().to_pylist() == ROWS
    assert growing.table().to_pylist() == ROWS


def test_a_file_holds_all_records_some_chunks_to_a_group(tmp_path):
    schema = schema_of(Record)
    write_batches(tmp_path / "a.parquet", schema, batches_of(RECORDS, schema))
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == ROWS
    written = pq.ParquetFile(tmp_path / "a.parquet").metadata
    assert [written.row_group(i).num_rows for i in range(written.num_row_groups)] == [6, 5]


def test_a_schema_is_that_of_the_type_whatever_the_records_hold():
    none = GrowingTable(schema_of(Record)).table()
    assert none.schema.names == ["name", "size", "time_s", "parts"]
    assert none.schema.types == [pa.string(), pa.int64(), pa.float64(), pa.list_(pa.int64())]
    chosen = schema_of(Record, without=("parts", "name"), more={"rank": int})
    assert chosen.names == ["size", "time_s", "rank"]
    with pytest.raises(TypeError, match="no Arrow type for <class 'bytes'>"):
        schema_of(Record, more={"raw": bytes})


def test_numbers_become_floats_and_none_becomes_nan():
    growing = GrowingTable(schema_of(Record))
    for record in RECORDS[:5]:
        growing.add(record)
    table = growing.table()
    np.testing.assert_array_equal(
        numpy_column(table["time_s"]), [np.nan, 1 / 8, 2 / 8, 3 / 8, np.nan]
    )
    assert numpy_column(table["size"]).dtype == np.float64
    assert numpy_column(table["name"]).tolist() == ["r0", "r1", "r2", "r3", "r4"]
