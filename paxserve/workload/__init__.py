"""Where requests come from: the protocol of the workload axis.

A workload opens a `Source` for one run. Most sources know all their arrivals beforehand; a closed
loop or a conversation learns of each request's end before it sends the next. Nothing here knows
how a request is served.
"""

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a workload may know of the model: its token ids are 0..size-1, and how text becomes
    ids, None for a model without a tokenizer.
    """

    size: int
    encode: Callable[[str], Sequence[int]] | None = None


class Source(Protocol):
    """The arrivals of one run, in order of time."""

    @property
    def num_requests(self) -> int:
        """How many there will be in all, if every one that ends is told of."""

    def next_s(self) -> float | None:
        """When the next one arrives; None: none does, or none until a request ends."""

    def take(self) -> Arrival:
        """The next one, once its time has come. Call only when `next_s` is not None."""

    def on_end(self, request_id: str, time_s: float, output_token_ids: Sequence[int]) -> None:
        """A request that was taken has ended, or was refused; called once for each."""


class Workload(Protocol):
    """Makes the arrivals of a run. With `forces_lengths` it says how long every output is, so that
    the run's own max_tokens and ignore_eos are read by nobody.
    """

    forces_lengths: bool

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """The arrivals; the same for the same seed.

        Raises:
            ValueError: settings or a file that cannot be what was meant, or a need for a tokenizer.
            FileNotFoundError: there is no such file.
        """
