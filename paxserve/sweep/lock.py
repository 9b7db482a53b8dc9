"""One sweep at a time in a directory.

Owns: the file `lock`. In: a directory. Out: a file descriptor that holds the lock as long as it is
open in any process. Must not know: what is done under it.

The kernel lets go of the lock when the last process that has it open ends, however it ends: there
are no stale locks. Children inherit it, so that a second sweep cannot begin while a cell of a
killed one is still in its last moments. The file itself stays, and says who had it last.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paxserve.notices import Say

LOCK = "lock"


@contextmanager
def locked(directory: Path, *, say: Say) -> Iterator[int]:
    """Hold the directory's lock; yields its file descriptor, for children to inherit.

    Where the sweep that holds it has been killed and only its cells remain, wait for them.

    Raises:
        ValueError: another sweep holds it.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, directory, say)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int, directory: Path, say: Say) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, host = os.pread(descriptor, 300, 0).decode().strip().partition(" ")
        if not pid.isdecimal() or host != socket.gethostname() or _is_alive(int(pid)):
            raise ValueError(
                f"run_dir={directory} is in use by another sweep (process {pid or '?'} on "
                f"{host or 'some host'}): wait for it, or end it first"
            ) from None
        say(f"waiting for the last cells of a sweep that was killed (process {pid})")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
