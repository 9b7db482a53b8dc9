"""Shortest job first: by the length of the output, true or predicted.

Source: Fu et al., NeurIPS'24 (learning to rank), section 3; Qiu et al. 2024 (SSJF), section 3.
Differs: the predictor is the trace's own, or the true length with an error of a given size.
"""

from dataclasses import dataclass

from paxserve.admission import Key
from paxserve.prediction import Known, check_knobs, expected_output_tokens
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Sjf:
    """Args:

    length: `oracle` (the trace's true length) or `predicted` (what the trace's predictor said).
    error: sigma of a log-normal factor on it, fixed by the request's id.
    default_tokens: for requests of which neither is known; None: as many as they may produce.
    """

    length: Known = "oracle"
    error: float = 0.0
    default_tokens: int | None = None
    displaces_running = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check_knobs(length=self.length, error=self.error, default_tokens=self.default_tokens)

    def key(self, state: None, request: Request) -> Key:
        """See `Admission.key`."""
        expected = expected_output_tokens(
            request, length=self.length, error=self.error, default_tokens=self.default_tokens
        )
        return (expected,)
