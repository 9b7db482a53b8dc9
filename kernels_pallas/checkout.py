"""The commit of the code that runs.

Owns: how git is asked. Imports the standard library alone. Must not know: what asks.
"""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Commit(NamedTuple):
    """Of a checkout; `is_dirty`: its files are not those of the commit."""

    git_commit: str
    git_dirty: bool


def commit_of(file: Path) -> Commit | None:
    """Asked of the checkout that a file belongs to; None: it belongs to none."""
    if _git(file, "ls-files", "--error-unmatch", str(file)) is None:
        return None
    commit, status = _git(file, "rev-parse", "HEAD"), _git(file, "status", "--porcelain")
    if commit is None or status is None:
        return None
    return Commit(commit, bool(status))


def _git(file: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(file.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
