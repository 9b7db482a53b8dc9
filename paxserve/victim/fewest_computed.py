"""The request with the least KV is preempted first: the least work is lost.

Source: none published that we know of; it takes the cost of recomputing (Kwon et al., SOSP'23,
section 4.5) for the rank, where vLLM takes the order of arrival.
"""

from dataclasses import dataclass

from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class FewestComputed:
    """By computed tokens of all its sequences, fewest first, then newest."""

    def key(self, request: Request) -> tuple[int, int]:
        """See `Victim.key`."""
        num_computed = sum([s.num_computed_tokens for s in request.sequences])
        return (num_computed, -request.admitted_seq)
