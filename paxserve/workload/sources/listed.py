"""A source of arrivals that were all written down beforehand.

Owns: their order. In: arrivals. Out: the same, by time. Must not know: where they came from.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from paxserve.workload import Arrival


class Listed:
    """Arrivals by time, those of one time in the given order. Ends change nothing.

    Invariant: taken + still to come == num_requests.
    """

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._coming = deque(sorted(arrivals, key=lambda arrival: arrival.arrival_s))
        self.num_requests = len(self._coming)

    def next_s(self) -> float | None:
        """See `Source.next_s`."""
        return self._coming[0].arrival_s if self._coming else None

    def take(self) -> Arrival:
        """See `Source.take`."""
        return self._coming.popleft()

    def on_end(self, request_id: str, time_s: float, output_token_ids: Sequence[int]) -> None:
        """See `Source.on_end`."""
