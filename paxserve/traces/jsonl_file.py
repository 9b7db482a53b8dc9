"""Objects of a JSON-lines file.

Owns: what a line is. In: a path. Out: (place, object) per line. Must not know: what fields mean.
"""

import json
from collections.abc import Iterator
from typing import Any

from paxserve.numbers import shown
from paxserve.traces.text_file import open_text


def read_jsonl(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Number of the line from 1, the place to name in errors, the object. Empty lines are skipped.

    Raises:
        ValueError: a line is not a JSON object.
        FileNotFoundError: there is no such file.
    """
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path} line {number}"
                yield number, place, _object(line, place)


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{place} must hold an object, got {line.strip()[:60]}")
    return fields


def field(fields: dict[str, Any], name: str, place: str) -> Any:
    """A field that must be there.

    Raises:
        ValueError: it is not.
    """
    if name not in fields:
        raise ValueError(f"{place}: {name} is missing, there are {', '.join(fields) or 'none'}")
    return fields[name]


def text_field(fields: dict[str, Any], name: str, place: str) -> str:
    """A field that must be there and hold text.

    Raises:
        ValueError: it is not, or does not.
    """
    value = field(fields, name, place)
    if not isinstance(value, str):
        raise ValueError(f"{place}: {name} must be a string, got {shown(value)}")
    return value
