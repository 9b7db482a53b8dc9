"""Requests that were never recorded: arrivals x lengths x content, each chosen alone.

Owns: how many there are and whose. In: a seed. Out: a source. Must not know: how the parts draw.
"""

from dataclasses import dataclass

from paxserve.draws import Stream, stream, zipf_shares
from paxserve.numbers import MOST_REQUESTS, real, whole
from paxserve.workload import Source, Vocabulary
from paxserve.workload.arrivals import Arrivals
from paxserve.workload.content import Content
from paxserve.workload.lengths import Lengths
from paxserve.workload.sources.composed import with_content
from paxserve.workload.sources.conversations import KnownRequest


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Attributes:

    arrivals, lengths, content: choices of the axes of those names.
    num_requests: each turn of a conversation counts.
    num_clients: accounts that requests belong to, `client-0` the busiest; 1: none is named.
    client_exponent: of Zipf's law of their shares; 0: all ask equally often.
    num_priorities: priorities 0 to this less 1, all equally often.
    """

    arrivals: Arrivals
    lengths: Lengths
    content: Content
    num_requests: int
    num_clients: int
    client_exponent: float
    num_priorities: int

    forces_lengths = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_requests", "num_clients", "num_priorities"):
            whole(name, getattr(self, name), low=1, high=MOST_REQUESTS)
        real("client_exponent", self.client_exponent, high=10.0)

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        lengths = self.lengths.draw(self.num_requests, stream(seed, Stream.LENGTHS))
        parts = zip(lengths, self._clients(seed), self._priorities(seed), strict=True)
        requests = [
            KnownRequest(
                num_prompt_tokens=length.num_prompt_tokens,
                num_output_tokens=length.num_output_tokens,
                client=client,
                priority=priority,
            )
            for length, client, priority in parts
        ]
        return with_content(requests, self.arrivals, self.content, seed=seed, vocabulary=vocabulary)

    def _clients(self, seed: int) -> list[str]:
        if self.num_clients == 1:
            return [""] * self.num_requests
        shares = zipf_shares(self.num_clients, self.client_exponent)
        rng = stream(seed, Stream.CLIENTS)
        drawn = rng.choice(self.num_clients, size=self.num_requests, p=shares)
        return [f"client-{client}" for client in drawn.tolist()]

    def _priorities(self, seed: int) -> list[int]:
        rng = stream(seed, Stream.PRIORITIES)
        drawn: list[int] = rng.integers(self.num_priorities, size=self.num_requests).tolist()
        return drawn
