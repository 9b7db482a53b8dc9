"""Longest cached prefix first.

Source: SGLang (Zheng et al., NeurIPS'24), section 3 and its `schedule_policy`, where it is called
lpm. Differs: a request that would share its prefix with one ahead is left out for the step, not
put behind everyone; lengths shared are found by comparing prompts, not in a second radix tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paxserve.admission import Key
from paxserve.numbers import MOST_REQUESTS, MOST_TOKENS, whole
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class LongestPrefixHit:
    """Args:

    reorders_at_most: with more requests waiting it is first come, first served.
    shared_tokens: who shares more than this many tokens that are not cached with one ahead of it
        waits, so that it finds them cached.
    """

    reorders_at_most: int = 128
    shared_tokens: int = 32
    displaces_running = False

    def __post_init__(self) -> None:
        """Check the fields."""
        whole("reorders_at_most", self.reorders_at_most, high=MOST_REQUESTS)
        whole("shared_tokens", self.shared_tokens, high=MOST_TOKENS)

    def key(self, state: None, request: Request) -> Key:
        """See `Admission.key`: by arrival."""
        return (request.arrival_s,)

    def reorder(
        self, requests: Sequence[Request], num_cached_tokens: Callable[[Request], int]
    ) -> list[Request]:
        """See `Reordering.reorder`; among equals, the earlier arrival."""
        cached = {request: num_cached_tokens(request) for request in requests}
        ordered: list[Request] = []
        for request in sorted(requests, key=lambda request: -cached[request]):
            least = cached[request] + self.shared_tokens + 1
            if not any(_shares(request, ahead, least) for ahead in ordered):
                ordered.append(request)
        return ordered


def _shares(request: Request, ahead: Request, num_tokens: int) -> bool:
    """Whether the first `num_tokens` are the same; the last one is looked at first."""
    a, b = request.trunk.token_ids, ahead.trunk.token_ids
    return (
        min(request.num_prompt_tokens, ahead.num_prompt_tokens) >= num_tokens
        and a[num_tokens - 1] == b[num_tokens - 1]
        and request.origin.cache_salt == ahead.origin.cache_salt
        and a[:num_tokens] == b[:num_tokens]
    )
