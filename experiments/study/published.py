"""What papers print or draw: `published_curves.csv` beside the traces.

Owns: its columns. In: the folder of reference data, and which curve. Out: points. Must not know:
what they are compared with.
"""

import csv
from pathlib import Path

from paxserve.claims.knees import Point


def curve(data: Path, *, paper: str, figure: str, panel: str, series: str) -> list[Point]:
    """The points of one series, by x; a panel is named by how it begins.

    Raises:
        ValueError: there is no such series.
    """
    rows = [
        row
        for row in _rows(data)
        if (row["paper"], row["figure"], row["series"]) == (paper, figure, series)
        and row["panel"].startswith(panel)
    ]
    if not rows:
        raise ValueError(f"no curve {series!r} in panel {panel!r} of figure {figure} of {paper}")
    return sorted(Point(float(row["x"]), float(row["y"])) for row in rows)


def value(data: Path, *, paper: str, figure: str, panel: str, series: str) -> float:
    """The one number of a bar.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [
        float(row["y"])
        for row in _rows(data)
        if (row["paper"], row["figure"], row["panel"], row["series"])
        == (paper, figure, panel, series)
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} numbers {series!r} of {panel!r} in figure {figure}")
    return found[0]


def _rows(data: Path) -> list[dict[str, str]]:
    with (data / "published_curves.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
