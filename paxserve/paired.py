"""Two servings of the same requests, compared request by request.

Owns: what a paired difference is, and how sure its mean is. Pure. In: request records of two runs.
Out: differences, and a summary of each figure. Must not know: where the runs come from.

Pairing takes the spread between requests out of the comparison, which is what makes a small effect
visible; the interval is of the mean over requests like these. It does not know of requests that
delay each other, so under load it is narrower than that of a new run would be.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from paxserve.metrics import RequestRecord

FIGURES = ("ttft_s", "tpot_s", "e2e_s", "queue_time_s")
_DIGITS = 12  # of a difference in seconds: what is less than that is rounding of the clock
_NUM_RESAMPLES = 2000
_AT_ONCE = 50  # resamples drawn in one go, so that memory stays small


class PairedRecord(NamedTuple):
    """One request under both; differences are second less first, None where one is undefined."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    first_ttft_s: float | None
    second_ttft_s: float | None
    ttft_s: float | None
    first_tpot_s: float | None
    second_tpot_s: float | None
    tpot_s: float | None
    first_e2e_s: float | None
    second_e2e_s: float | None
    e2e_s: float | None
    first_queue_time_s: float | None
    second_queue_time_s: float | None
    queue_time_s: float | None


class Paired(NamedTuple):
    """The differences of one figure over all requests that have it twice.

    share_better: of requests for which it became smaller. low, high: 95 % interval of the mean.
    """

    num_requests: int
    mean: float
    median: float
    share_better: float
    share_equal: float
    low: float
    high: float


def paired_records(
    first: Iterable[RequestRecord], second: Iterable[RequestRecord]
) -> list[PairedRecord]:
    """The requests that both have.

    Raises:
        ValueError: there is none.
    """
    others = {record.request_id: record for record in second}
    found = [_pair(one, others[one.request_id]) for one in first if one.request_id in others]
    if not found:
        raise ValueError("the two runs have no request in common")
    return found


def summarize_pairs(records: Iterable[PairedRecord], *, seed: int = 0) -> dict[str, Paired]:
    """Each figure that any request has."""
    records = list(records)
    found: dict[str, Paired] = {}
    for figure in FIGURES:
        values = [value for r in records if (value := getattr(r, figure)) is not None]
        if values:
            found[figure] = _summary(np.array(values, np.float64), seed)
    return found


def mean_interval(values: np.ndarray, *, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap over the values.

    Source: Efron, "Bootstrap methods: another look at the jackknife", 1979; percentile intervals,
    Efron and Tibshirani 1993, chapter 13.
    """
    rng, means = np.random.default_rng(seed), []
    for _ in range(_NUM_RESAMPLES // _AT_ONCE):
        chosen = rng.integers(0, len(values), (_AT_ONCE, len(values)))
        means.append(values[chosen].mean(axis=1))
    outside = 50 * (1 - level)
    low, high = np.percentile(np.concatenate(means), (outside, 100 - outside))
    return float(low), float(high)


def _summary(values: np.ndarray, seed: int) -> Paired:
    low, high = mean_interval(values, seed=seed)
    return Paired(
        num_requests=len(values),
        mean=float(values.mean()),
        median=float(np.median(values)),
        share_better=float((values < 0).mean()),
        share_equal=float((values == 0).mean()),
        low=low,
        high=high,
    )


def _pair(one: RequestRecord, other: RequestRecord) -> PairedRecord:
    figures: Mapping[str, float | None] = {
        name: value
        for figure in FIGURES
        for name, value in _differences(figure, getattr(one, figure), getattr(other, figure))
    }
    return PairedRecord(
        request_id=one.request_id,
        num_prompt_tokens=one.num_prompt_tokens,
        num_output_tokens=one.num_output_tokens,
        **figures,
    )


def _differences(
    figure: str, first: float | None, second: float | None
) -> Iterable[tuple[str, float | None]]:
    difference = None if first is None or second is None else round(second - first, _DIGITS)
    return ((f"first_{figure}", first), (f"second_{figure}", second), (figure, difference))
