"""Which requests of a data set are kept, by their lengths.

Source: the filters of vLLM: total <= 2048 in its paper (section 6.1), and in its benchmark for
ShareGPT at least 4 tokens each, prompts <= 1024, total <= 2048.
"""

from dataclasses import dataclass

from paxserve.numbers import MOST_TOKENS, whole


@dataclass(frozen=True, slots=True)
class LengthFilter:
    """Bounds, inclusive; `min_tokens` is for prompt and output each, None is no bound."""

    min_tokens: int = 1
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check each."""
        whole("min_tokens", self.min_tokens, low=1, high=MOST_TOKENS)
        for name, low in (("max_input_tokens", 1), ("max_total_tokens", 2)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), low=low, high=MOST_TOKENS)

    def keeps(self, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        """Whether a request is within the bounds."""
        most_input, most_total = self.max_input_tokens, self.max_total_tokens
        return (
            min(num_prompt_tokens, num_output_tokens) >= self.min_tokens
            and (most_input is None or num_prompt_tokens <= most_input)
            and (most_total is None or num_prompt_tokens + num_output_tokens <= most_total)
        )
