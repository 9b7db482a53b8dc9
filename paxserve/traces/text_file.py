"""Opening a text file that a user named.

Owns: how a missing or undecodable file is reported. In: a path. Out: the open file. Must not know:
what is in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def open_text(path: str, *, what: str = "workload") -> Iterator[TextIO]:
    """The file, as UTF-8 with or without a byte order mark, its line ends as they are. `what` it
    is a file of is for the errors.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not UTF-8; raised where the file is read, inside the `with`.
    """
    if Path(path).is_dir():
        raise FileNotFoundError(f"{what} file {path!r} is a directory")
    if not Path(path).exists():
        raise FileNotFoundError(f"{what} file {path!r} does not exist")
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error


def stamp_of(path: str) -> int:
    """Changes when the file does; 0 if there is none. For those who keep what they read."""
    file = Path(path)
    return file.stat().st_mtime_ns if file.exists() else 0
