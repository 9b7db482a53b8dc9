"""Tables in Markdown, and where they stand in a README: between markers that a rerun refreshes.

Owns: `<!-- NAME -->` and `<!-- /NAME -->`. In: rows, a file. Out: text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from paxserve.files import write_text

type Value = str | float | int | None


def table(header: Sequence[str], rows: Sequence[Sequence[Value]], *, digits: int = 3) -> str:
    """A Markdown table; numbers with so many significant digits."""
    lines = [_line(header), _line(["---"] * len(header))]
    lines += [_line([written(value, digits=digits) for value in row]) for row in rows]
    return "\n".join(lines)


def written(value: Value, *, digits: int = 3) -> str:
    """A cell."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    rounded = f"{value:.{digits}g}"
    return rounded if "e" not in rounded else f"{value:.0f}"


def ratio(measured: float | None, published: float | None) -> str:
    """Measured over published."""
    return f"{measured / published:.2f}" if measured is not None and published else "-"


def mark(holds: bool) -> str:
    """How the line of a verdict begins."""
    return "- **Holds.** " if holds else "- **Does not hold.** "


def refresh(path: Path, parts: Mapping[str, str]) -> None:
    """Put each part between its markers.

    Raises:
        ValueError: a part has no markers in the file.
    """
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{path} has no lines {start.strip()} and {end}")
        text = f"{before}{start}{part}\n{end}{after}"
    write_text(path, text)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
