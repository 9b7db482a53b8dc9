"""Shortest prompt first.

Source: shortest job first with the one length that is known at arrival; the usual baseline of
papers on predicted lengths (Qiu et al. 2024, Fu et al. 2024).
"""

from dataclasses import dataclass

from paxserve.admission import Key
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class ShortestPrompt:
    """By prompt tokens."""

    displaces_running = False

    def key(self, state: None, request: Request) -> Key:
        """See `Admission.key`."""
        return (request.num_prompt_tokens,)
