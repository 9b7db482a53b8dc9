"""Swap a request with several sequences, recompute one with a single sequence.

Source: vLLM V0's default (`_preempt` without a `preemption_mode`): to recompute one sequence costs
less than to copy it, and recomputing could not put sequences that share blocks together again.
"""

from dataclasses import dataclass

from paxserve.preemption import Method, VictimView
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class ByWidth:
    """By the number of sequences of the victim."""

    swaps = True

    def choose(self, request: Request, victim: VictimView) -> Method:
        """See `Preemption.choose`."""
        return Method.SWAP if len(request.live) > 1 else Method.RECOMPUTE
