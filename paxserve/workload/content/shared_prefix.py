"""Groups of requests that begin alike: system prompts, few-shot examples, documents.

Source: the generated shared prefixes of SGLang's benchmark (Zheng et al., NeurIPS 2024); there all
groups are equally popular.
"""

from dataclasses import dataclass

from paxserve import draws
from paxserve.numbers import MOST_TOKENS, real, whole
from paxserve.workload import Vocabulary

MOST_GROUPS = 100_000


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Attributes:

    num_groups: prefixes there are.
    prefix_tokens: their length; a request's own tokens come after it.
    exponent: of Zipf's law: the k-th group is asked for k ** -exponent as often as the first.
    """

    num_groups: int
    prefix_tokens: int
    exponent: float

    num_turns = 1
    think_s = 0.0

    def __post_init__(self) -> None:
        """Check each."""
        whole("num_groups", self.num_groups, low=1, high=MOST_GROUPS)
        whole("prefix_tokens", self.prefix_tokens, low=1, high=MOST_TOKENS)
        real("exponent", self.exponent, high=10.0)

    def token_ids(
        self, number: int, num_tokens: int, *, seed: int, vocabulary: Vocabulary
    ) -> tuple[int, ...]:
        """See `Content.token_ids`."""
        shares = draws.zipf_shares(self.num_groups, self.exponent)
        rng = draws.stream(seed, draws.Stream.GROUPS, number)
        group = int(rng.choice(self.num_groups, p=shares))
        prefix = draws.token_ids(
            self.prefix_tokens,
            vocabulary.size,
            seed=seed,
            kind=draws.Stream.PREFIXES,
            number=group,
        )
        return prefix + draws.token_ids(
            num_tokens, vocabulary.size, seed=seed, kind=draws.Stream.CONTENT, number=number
        )
