"""Rows of a CSV file with a header.

Owns: columns that must be there. In: a path. Out: (place, fields as text) per row. Must not know:
what columns mean.
"""

import csv
from collections.abc import Iterator, Sequence

from paxserve.traces.text_file import open_text


def header_of(path: str, *, what: str = "workload") -> list[str]:
    """The names of the columns.

    Raises:
        ValueError: the file is empty.
        FileNotFoundError: there is none.
    """
    with open_text(path, what=what) as file:
        header = next(csv.reader(file), None)
    if not header:
        raise ValueError(f"{path} line 1: no header, the file must begin with names of columns")
    return header


def read_csv(
    path: str, columns: Sequence[str], *, what: str = "workload"
) -> Iterator[tuple[str, list[str]]]:
    """The given columns of each row, with the place to name in errors. Empty lines are skipped.

    Raises:
        ValueError: a column is missing, from the file or from a row.
        FileNotFoundError: there is no such file.
    """
    header = header_of(path, what=what)
    for column in columns:
        if column not in header:
            raise ValueError(f"{path} line 1: no column {column}, there are {', '.join(header)}")
    indices = [header.index(column) for column in columns]
    with open_text(path, what=what) as file:
        reader = csv.reader(file)
        try:
            next(reader)
            for fields in reader:
                place = f"{path} line {reader.line_num}"
                if fields:
                    yield place, [_field(fields, i, header, place) for i in indices]
        except csv.Error as error:
            raise ValueError(f"{path} line {reader.line_num} is not CSV: {error}") from error


def _field(fields: list[str], index: int, header: Sequence[str], place: str) -> str:
    if index >= len(fields):
        raise ValueError(
            f"{place}: {header[index]} is missing, the row has {len(fields)} of {len(header)} "
            f"fields: {','.join(fields)[:60]}"
        )
    return fields[index]
