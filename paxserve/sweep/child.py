"""`python -m paxserve.sweep.child DIR OVERRIDES`: `paxserve run` into DIR, as a part of a sweep.

Owns: that the run ends when the sweep does. In: a directory, overrides, and standard input, which
the sweep holds open. Out: as of `paxserve run`. Must not know: the sweep.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Run; the exit code is that of `paxserve run`."""
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    from paxserve.cli import run_command

    return run_command(arguments[1:], into=Path(arguments[0]))


def _end_with_the_sweep() -> None:
    """Standard input ends when the process at its other end does, even if it was killed."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
