"""Files and directories that are whole or not there.

Owns: the only ways in which results reach the disk: a temporary name, flushed to disk, renamed. In:
paths and contents. Out: files. Must not know: what is in them.

Whatever ends the process, a name holds the old content or the new. `boundary` is called around
every change of the disk; it does nothing, and tests put their own in its place to end the process
there.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_TEMPORARY = ".tmp-"


def boundary(what: str, path: Path) -> None:
    """The disk has just changed, or is about to."""


def write_text(path: Path, text: str) -> None:
    """A UTF-8 file with this text."""
    write_lines(path, (text,), end="")


def write_lines(path: Path, lines: Iterable[str], *, end: str = "\n") -> None:
    """A UTF-8 file of these lines, each written as it comes."""
    with whole(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}{end}" for line in lines)


def write_arrow(path: Path, table: pa.Table) -> None:
    """A Parquet file with this table."""
    with whole(path) as temporary:
        pq.write_table(table, temporary)


def replace_directory(new: Path, path: Path) -> None:
    """`path` is what `new` was; an older `path` is gone. Both lie in the same directory.

    A process that ends in between leaves `new` as it is, and perhaps the old one under a temporary
    name.
    """
    old = path.with_name(f"{path.name}{_TEMPORARY}{os.getpid()}")
    if path.exists():
        boundary("replace", path)
        path.rename(old)
    boundary("rename", path)
    new.rename(path)
    boundary("renamed", path)
    remove_directory(old)


def remove_directory(path: Path) -> None:
    """Remove it, whatever is in it; fine if it is not there."""
    if path.exists():
        boundary("remove", path)
        shutil.rmtree(path, ignore_errors=True)


def remove_temporaries(directory: Path) -> None:
    """Remove what processes that were ended have left in a directory under temporary names."""
    for path in directory.glob(f"*{_TEMPORARY}*"):
        boundary("remove", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to, which becomes `path` when all of it is on the disk."""
    temporary = path.with_name(f"{path.name}{_TEMPORARY}{os.getpid()}")
    boundary("write", path)
    try:
        yield temporary
        boundary("written", path)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    boundary("there", path)
