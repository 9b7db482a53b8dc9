"""JSON files of what was measured: written while the work goes on, each time whole or not at all.

Owns: how such a file is read and replaced. In and out: plain data. Must not know: what it says.
"""

import json
import os
from pathlib import Path
from typing import Any


def check_writable(option: str, file: Path) -> None:
    """Before the work is done whose result goes there.

    Raises:
        FileNotFoundError: it is a directory, or in none.
    """
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"{option} {file} cannot be written: it must be a file's name")


def read(file: Path) -> dict[str, Any]:
    """What the file says; nothing if there is none."""
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write(file: Path, value: dict[str, Any]) -> None:
    """In place of what the file said before."""
    partial = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)
