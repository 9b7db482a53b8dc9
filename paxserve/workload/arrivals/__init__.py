"""When requests arrive: the protocol of the workload/arrivals axis.

What arrives is a conversation; a lone request is a conversation of one turn.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Arrivals(Protocol):
    """Says when conversations start. Fewer starts than conversations close the loop: each start is
    a user, who starts the next of their conversations `think_s` after the end of the one before.
    """

    @property
    def think_s(self) -> float:
        """From the end of a conversation to the next one of its user."""

    def starts(
        self, num_conversations: int, rng: np.random.Generator, recorded_s: Sequence[float] | None
    ) -> Sequence[float]:
        """Times from the start of the run, never going back.

        Args:
            num_conversations: how many there are.
            rng: for this only.
            recorded_s: their times in the workload's own trace, if it has times.

        Raises:
            ValueError: the times that are wanted do not exist.
        """
