"""Where requests come from: the protocol of the workload axis.

A workload is a list of arrivals, each with its time, its content and its own limits. Nothing here
knows what becomes of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request to come. Exactly one of the three contents is given.

    `arrival_s` counts from the start of the run. `max_tokens` and `seed` override the run's
    sampling settings for this request.
    """

    request_id: str
    arrival_s: float = 0.0
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Workload(Protocol):
    """Makes the arrivals of a run."""

    def arrivals(self) -> Sequence[Arrival]:
        """All of them, by arrival time."""
