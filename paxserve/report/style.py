"""One look for all pictures.

Owns: the colours (after Okabe and Ito, told apart with every kind of colour vision), fonts and
frames. In: sizes and titles. Out: empty pictures. Must not know: what is drawn.

No pyplot: a picture belongs to whoever asked for it, and shows itself in a notebook.
"""

from collections.abc import Sequence
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, SKY, GREEN, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#f0e442"
ORANGE, VERMILLION, PURPLE, BLACK = "#e69f00", "#d55e00", "#cc79a7", "#222222"
DEAD, IDLE, GRID = "#8c8c8c", "#e4e4e4", "#dddddd"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 11.0
DPI = 120


class Picture(Figure):
    """A figure that a notebook shows by itself."""

    def _repr_png_(self) -> bytes:
        out = BytesIO()
        self.savefig(out, format="png", dpi=DPI)
        return out.getvalue()

    def save(self, path: Path) -> None:
        """Write a PNG."""
        self.savefig(path, dpi=DPI)


def panels(
    heights: Sequence[float], *, columns: int = 1, width: float = WIDTH, share_x: bool = False
) -> tuple[Picture, list[Axes]]:
    """A picture of panels, row by row; heights in inches."""
    picture = Picture(figsize=(width, sum(heights)), layout="constrained")
    grid = picture.subplots(
        len(heights), columns, squeeze=False, sharex=share_x, height_ratios=list(heights)
    )
    return picture, [plain(axis) for axis in grid.flat]


def plain(axis: Axes) -> Axes:
    """No frame but the two axes, small numbers."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=9)
    axis.xaxis.label.set_fontsize(10)
    axis.yaxis.label.set_fontsize(10)
    return axis


def whole_numbers(axis: Axes) -> None:
    """Ticks at whole numbers only, upwards."""
    axis.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def title(axis: Axes, text: str) -> None:
    """A panel's title, left, over the plot."""
    axis.set_title(text, loc="left", fontsize=10.5)


def legend_below(picture: Picture, handles: Sequence[object], *, columns: int) -> None:
    """One legend for all panels, under them."""
    picture.legend(
        handles=list(handles),
        loc="outside lower left",
        ncol=columns,
        frameon=False,
        fontsize=9,
        handlelength=1.6,
        columnspacing=1.4,
    )


def series_colours(number: int) -> list[str]:
    """A colour per series."""
    return list(islice(cycle(SERIES), number))


def series_lines(number: int) -> list[str]:
    """A dash pattern per series: changes when the colours begin again."""
    return [LINES[i // len(SERIES) % len(LINES)] for i in range(number)]
