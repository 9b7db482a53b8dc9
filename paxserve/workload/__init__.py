"""Where requests come from: the protocol of the workload axis.

A workload opens a `Source` for one run. Most sources know all their arrivals beforehand; a closed
loop or a conversation learns of each request's end before it sends the next. Nothing here knows
how a request is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paxserve.request import NO_ORIGIN, Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request to come. Exactly one of the three contents is given.

    `arrival_s` counts from the start of the run. `max_tokens`, `ignore_eos` and `seed` override the
    run's sampling settings for this request.
    """

    request_id: str
    arrival_s: float = 0.0
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    origin: Origin = NO_ORIGIN


class Workload(Protocol):
    """Makes the arrivals of a run."""

    def arrivals(self) -> Sequence[Arrival]:
        """All of them, by arrival time."""
