"""How long prompts and outputs are: the protocol of the workload/lengths axis."""

from typing import NamedTuple, Protocol

import numpy as np


class Length(NamedTuple):
    """Of one request. The prompt counts what the user says in this turn; a shared prefix or the
    turns before come on top.
    """

    num_prompt_tokens: int
    num_output_tokens: int


class Lengths(Protocol):
    """Draws lengths."""

    def draw(self, num_requests: int, rng: np.random.Generator) -> list[Length]:
        """One per request, both parts at least 1.

        Raises:
            ValueError: settings that allow no request, or a file that is not as described.
        """
