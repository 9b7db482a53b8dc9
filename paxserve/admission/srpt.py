"""Shortest remaining processing time: by the tokens that are still to come.

Source: Schrage 1968; as a baseline in FastServe (Wu et al. 2023), Figure 4. Differs: work is
counted in output tokens, not in seconds, and what a preemption makes recompute is not counted.
"""

from dataclasses import dataclass

from paxserve.admission import Key
from paxserve.numbers import flag
from paxserve.prediction import Known, check_knobs, expected_output_tokens
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Srpt:
    """Args:

    length, error, default_tokens: as in `Sjf`.
    displaces_running: a shorter newcomer takes the row or memory of a longer running request.
    """

    length: Known = "oracle"
    error: float = 0.0
    default_tokens: int | None = None
    displaces_running: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        check_knobs(length=self.length, error=self.error, default_tokens=self.default_tokens)
        flag("displaces_running", self.displaces_running)

    def key(self, state: None, request: Request) -> Key:
        """See `Admission.key`; one that outlives its prediction is about to end."""
        expected = expected_output_tokens(
            request, length=self.length, error=self.error, default_tokens=self.default_tokens
        )
        return (max(1.0, expected - request.num_produced_tokens),)
