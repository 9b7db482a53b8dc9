"""The request admitted last is preempted first.

Source: vLLM, Kwon et al., SOSP'23, section 4.5. A resumed request counts as new.
"""

from dataclasses import dataclass

from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class Newest:
    """By admission, newest first."""

    def key(self, request: Request) -> tuple[int]:
        """See `Victim.key`."""
        return (-request.admitted_seq,)
