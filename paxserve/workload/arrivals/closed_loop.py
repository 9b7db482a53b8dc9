"""A fixed number of users, each waiting for an answer before asking again.

Source: the closed system model of Schroeder, Wierman and Harchol-Balter, "Open versus closed: a
cautionary tale", NSDI 2006. Each user has a list of questions of their own, where load generators
often hand out the next question to whoever is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paxserve.numbers import MOST_REQUESTS, MOST_S, real, whole


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Attributes:

    num_users: at most so many requests are in the system; all start at time 0.
    think_s: from the end of a conversation to the next one of its user.
    """

    num_users: int
    think_s: float

    def __post_init__(self) -> None:
        """Check both."""
        whole("num_users", self.num_users, low=1, high=MOST_REQUESTS)
        real("think_s", self.think_s, high=MOST_S)

    def starts(
        self, num_conversations: int, rng: np.random.Generator, recorded_s: Sequence[float] | None
    ) -> Sequence[float]:
        """See `Arrivals.starts`."""
        return [0.0] * min(self.num_users, num_conversations)
