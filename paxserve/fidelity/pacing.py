"""Arrivals nearer together or further apart.

Owns: a factor on the times of a source. In: a source whose arrivals wait for nobody. Out: a
`Source`. Must not know: what the factor is for.
"""

from collections.abc import Sequence
from dataclasses import replace

from paxserve.workload import Arrival, Source


class Paced:
    """The arrivals of another source, at `factor` times their times; 0: all at once."""

    def __init__(self, source: Source, factor: float) -> None:
        self._source = source
        self._factor = factor

    @property
    def num_requests(self) -> int:
        """See `Source.num_requests`."""
        return self._source.num_requests

    def next_s(self) -> float | None:
        """See `Source.next_s`."""
        time_s = self._source.next_s()
        return None if time_s is None else self._factor * time_s

    def take(self) -> Arrival:
        """See `Source.take`."""
        arrival = self._source.take()
        return replace(arrival, arrival_s=self._factor * arrival.arrival_s)

    def on_end(self, request_id: str, time_s: float, output_token_ids: Sequence[int]) -> None:
        """See `Source.on_end`."""
        self._source.on_end(request_id, time_s, output_token_ids)


def last_arrival_s(source: Source) -> float:
    """When the last one arrives; takes all of them.

    Raises:
        ValueError: some come only when others have ended, so that load has no meaning.
    """
    taken, last_s = 0, 0.0
    while (next_s := source.next_s()) is not None:
        source.take()
        taken, last_s = taken + 1, next_s
    if taken < source.num_requests:
        raise ValueError(
            f"{source.num_requests - taken} of {source.num_requests} requests wait for others to "
            "end: choose a workload of independent arrivals, or leave --load away"
        )
    return last_s
