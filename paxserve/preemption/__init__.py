"""How a victim gives up its memory: the protocol of the preemption axis."""

from enum import StrEnum
from typing import Protocol

from paxserve.request import Request


class Method(StrEnum):
    """`RECOMPUTE`: drop the KV, compute the same tokens again on resume."""

    RECOMPUTE = "recompute"


class Preemption(Protocol):
    """Chooses the method, victim by victim."""

    def choose(self, request: Request) -> Method:
        """The method for this victim."""
