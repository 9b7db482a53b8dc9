"""The gates of an engine, asked in turn.

Owns: the states of gates that learn. In: what is seen, and questions. Out: the first refusal. Must
not know: what a gate looks at.
"""

from collections.abc import Sequence
from typing import Any

from paxserve.admission import Seen
from paxserve.gate import Gate, LearningGate, MemoryView
from paxserve.request import Request


class Gates:
    """Invariant: the i-th state is the fold of all that was seen under the i-th gate, None where it
    does not learn.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = tuple(gates)
        self._learning = [(i, g) for i, g in enumerate(gates) if isinstance(g, LearningGate)]
        self.clear()

    def clear(self) -> None:
        """Nothing was learned."""
        self._states: list[Any] = [None] * len(self._gates)
        for i, gate in self._learning:
            self._states[i] = gate.init()

    def __bool__(self) -> bool:
        """Whether there is any gate."""
        return bool(self._gates)

    @property
    def learns(self) -> bool:
        """Whether `tell` does anything."""
        return bool(self._learning)

    def tell(self, seen: Seen) -> None:
        """Something happened."""
        for i, gate in self._learning:
            self._states[i] = gate.observe(self._states[i], seen)

    def refusal(self, request: Request, memory: MemoryView) -> str | None:
        """Why the request may not enter now; None lets it in."""
        for gate, state in zip(self._gates, self._states, strict=True):
            why = gate.refusal(state, request, memory)
            if why is not None:
                return why
        return None
