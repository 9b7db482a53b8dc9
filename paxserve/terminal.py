"""The person at the terminal: progress bars on long work, messages beside them, quiet in a pipe.

Owns: standard error, and how wide tables are on standard output. Must not know: what the work is.
"""

import sys

from rich.console import Console
from tqdm import tqdm

PIPE_COLUMNS = 160  # a file or a pager has no width of its own; 80 would cut cells


def table_console() -> Console:
    """Standard output, as wide as the terminal, or wide where it is none."""
    is_watched = sys.stdout.isatty() or "ipykernel" in sys.modules
    return Console() if is_watched else Console(width=PIPE_COLUMNS)


class Terminal:
    """One bar at a time. Bars appear after a second, and only where standard error is a terminal or
    a notebook's; messages always.
    """

    def __init__(self) -> None:
        self._is_watched = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bar: tqdm | None = None
        self._what = ""

    def progress(self, what: str, done: int, total: int, *, note: str = "") -> None:
        """`done` of `total` of `what`, and a word beside the bar."""
        if self._bar is None or what != self._what:
            self.close()
            self._what = what
            self._bar = tqdm(
                desc=what,
                total=total,
                disable=not self._is_watched,
                delay=1.0,
                dynamic_ncols=True,
                file=sys.stderr,
            )
        self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def say(self, message: str) -> None:
        """A line, without tearing the bar."""
        tqdm.write(f"paxserve: {message}", file=sys.stderr)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
