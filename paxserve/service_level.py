"""Service levels: what a request, or a whole run, must keep.

Owns: goodput, growth of the queue, and how an SLO is written. In: requests and summary of a run.
Out: figures; which bounds are not met. Must not know: how a run is made, at which rate.

    goodput: the share of requests that were sent, and their rate, which ended well and kept every
    bound. A bound on tpot is kept by a request of one token. `vllm bench serve --goodput` calls
    the rate request_goodput, too.
    queue growth: s of queue time gained per s of arrivals, over the later half of the arrivals
    (least squares): 0 where a server keeps up, load - 1 where it does not.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np

from paxserve.ledger import SlotCounts
from paxserve.metrics import COMPLETED, Summary, summarize
from paxserve.numbers import real

SHARE, RATE = "goodput_share", "request_goodput"
MOST_MS = 1e9
_MOST_ALIKE = 5  # names that are offered for one that is not known
_FEWEST = 8  # points of a slope that says something
_CONDITION = re.compile(r"(\w+)(<=|>=|=)(\S+)")


# What is asked of requests: fields of `RequestRecord`, each for all of them, NaN where undefined.
FIELDS = ("finish_reason", "arrival_s", "queue_time_s", "ttft_s", "tpot_s", "e2e_s")
type Fields = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """Milliseconds that a request may take; None: as long as it likes.

    Raises:
        ValueError: a bound that is no positive number.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        """Check each value."""
        for name, bound in self.given.items():
            real(name, bound, high=MOST_MS, above=True)

    @property
    def given(self) -> dict[str, float]:
        """Those that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: bound for name, bound in values.items() if bound is not None}

    def are_kept(self, requests: Fields) -> np.ndarray:
        """Of each request, whether it ended well, and as fast as that."""
        kept = np.isin(requests["finish_reason"].astype(str), COMPLETED)
        for name, bound in self.given.items():
            kept &= ~(1000 * requests[name.replace("_ms", "_s")] > bound)  # of NaN: it is kept
        return kept

    def goodput(self, requests: Fields, *, num_sent: int, duration_s: float) -> Summary:
        """`goodput_share`, of all that were sent, and `request_goodput`, per second; None where
        nothing was sent or no time passed. Nothing at all without bounds.
        """
        if not self.given:
            return {}
        good = int(self.are_kept(requests).sum())
        return {
            SHARE: good / num_sent if num_sent else None,
            RATE: good / duration_s if duration_s > 0 else None,
        }


def queue_growth(requests: Fields) -> float | None:
    """See the module; None for few requests, or where all arrive at once."""
    points = np.array([requests["arrival_s"], requests["queue_time_s"]])
    points = points[:, ~np.isnan(points[1])]
    points = points[:, np.argsort(points[0], kind="stable")]
    if points.shape[1] < 2 * _FEWEST:
        return None
    arrivals, queues = points[:, points.shape[1] // 2 :]
    arrivals = arrivals - arrivals.mean()
    spread = float(arrivals @ arrivals)
    return float(arrivals @ queues) / spread if spread > 0 else None


class Bound(NamedTuple):
    """A summary's figure and the most, or least, that it may be."""

    name: str
    is_most: bool
    value: float

    def __str__(self) -> str:
        return f"{self.name} {'<=' if self.is_most else '>='} {self.value:g}"

    def is_met(self, figure: float) -> bool:
        """Whether the figure keeps it."""
        return figure <= self.value if self.is_most else figure >= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Bounds on figures of a summary; `per_request` is what goodput, if it is one of them, counts.

    Written as conditions with blanks between: `p99_itl_ms<=100`, or `=` for the same; and, all in
    one, `ttft_ms<=400 tpot_ms<=100 share>=0.9`, which says how many of the requests must keep
    bounds of their own.
    """

    bounds: tuple[Bound, ...]
    per_request: RequestBounds

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Slo":
        """Read conditions.

        Raises:
            ValueError: no condition, one that is none, or a figure that does not exist.
        """
        conditions = [_condition(part) for text in texts for part in text.split()]
        names = [bound.name for bound in conditions]
        own = {field.name for field in fields(RequestBounds)}
        limits = {bound.name: bound.value for bound in conditions if bound.name in own}
        known = figure_names()
        for bound in conditions:
            if names.count(bound.name) > 1:
                raise ValueError(f"the SLO bounds {bound.name} more than once")
            if not bound.is_most and bound.name != SHARE:
                raise ValueError(f"the SLO's {bound} must be a most: only share has a least")
            if bound.name not in known | own:
                close, others = _by_likeness(bound.name, known | own | {"share"})
                raise ValueError(
                    f"the SLO's {bound.name} is no figure of a run; there are {', '.join(close)}; "
                    f"and, less alike, {', '.join(others)}"
                )
        if bool(limits) != (SHARE in names):
            raise ValueError(
                "an SLO of single requests needs bounds and a share, such as "
                f"'ttft_ms<=400 tpot_ms<=100 share>=0.9', got {' '.join(texts)!r}"
            )
        if not conditions:
            raise ValueError("the SLO is empty: give a condition such as p99_itl_ms=100")
        bounds = tuple(bound for bound in conditions if bound.name not in own)
        return cls(bounds=bounds, per_request=RequestBounds(**limits))

    def unmet(self, figures: Mapping[str, float | None]) -> tuple[Bound, ...]:
        """The bounds that these figures break.

        Raises:
            ValueError: a figure is undefined, so that nobody can say.
        """
        broken = []
        for bound in self.bounds:
            figure = figures.get(bound.name)
            if figure is None or not math.isfinite(figure):
                raise ValueError(
                    f"{bound.name} is undefined ({figure}): no request of this workload has it, so "
                    "no SLO can bound it"
                )
            if not bound.is_met(figure):
                broken.append(bound)
        return tuple(broken)

    def __str__(self) -> str:
        own = [f"{name} <= {bound:g}" for name, bound in self.per_request.given.items()]
        of_requests = f" (of {', '.join(own)})" if own else ""
        return ", ".join(
            f"{bound}{of_requests if bound.name == SHARE else ''}" for bound in self.bounds
        )


def figure_names() -> set[str]:
    """What an SLO may bound: every figure of a summary, and goodput."""
    shares = {f"kv_share_{name}" for name in SlotCounts._fields if name != "null"}
    return set(summarize((), (), ())) | shares | {SHARE, RATE, "num_refused"}


def _by_likeness(name: str, known: set[str]) -> tuple[list[str], list[str]]:
    """Those that may have been meant, the likeliest first, and the rest by name."""
    close = get_close_matches(name, sorted(known), n=_MOST_ALIKE, cutoff=0.0)
    return close, sorted(known - set(close))


def _condition(text: str) -> Bound:
    found = _CONDITION.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no condition: write NAME<=VALUE, NAME>=VALUE or NAME=VALUE")
    name, sign, number = found.groups()
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r} must bound {name} by a number >= 0")
    if name == "share":
        if sign == "<=" or not 0 < value <= 1:
            raise ValueError(f"{text!r} must be a share of requests, such as share>=0.9")
        return Bound(SHARE, False, value)
    return Bound(name, sign != ">=", value)
