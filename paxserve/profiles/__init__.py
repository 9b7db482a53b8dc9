"""Step times that others measured, read from the files they published.

One file per format. Each opens a profile for a target and gives `Costs`: what the file has replaces
terms of a roofline, and what it lacks stays one, or is said to be missing. Files come from
elsewhere and are not trusted: every number is checked, and what is wrong is a `ValueError` that
names the file and the place. A profile is no formula beyond what was measured: what lies below its
first point takes as long as that point, what lies above its last one is an error, unless the format
is a formula.
"""

from collections.abc import Callable
from typing import NamedTuple

from paxserve.cost_model import Costs, Target


class Files(NamedTuple):
    """path: the profile. entry: which of several in it. links_path: one of exchanges beside it."""

    path: str
    entry: str | None
    links_path: str | None


class Format(NamedTuple):
    """needs, takes: settings of `cost_model=table` that must, or may, be given beside the path.
    open: a profile for a target, given a roofline's costs of the same target.
    """

    needs: tuple[str, ...]
    takes: tuple[str, ...]
    open: Callable[[Files, Target, Costs], Costs]


def terms_of(costs: Costs, *names: str) -> Callable[[tuple[float, ...]], tuple[float, ...]]:
    """Picks some terms of a step's costs."""
    places = [costs.terms.index(name) for name in names]
    return lambda seconds: tuple([seconds[place] for place in places])
