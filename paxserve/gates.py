"""The gates of a run, asked in turn.

Owns: the state of those that learn. In: what happens, and a request with the memory it would find.
Out: the first refusal. Must not know: what any gate looks at.
"""

from collections.abc import Sequence
from typing import Any

from paxserve.admission import Seen
from paxserve.gate import Gate, LearningGate, MemoryView
from paxserve.request import Request


class Gates:
    """`learn`: whether any of them wants to be told."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = list(gates)
        self._states: list[Any] = [
            gate.init() if isinstance(gate, LearningGate) else None for gate in gates
        ]
        self.learn = any(isinstance(gate, LearningGate) for gate in gates)

    def __bool__(self) -> bool:
        return bool(self._gates)

    def tell(self, seen: Seen) -> None:
        """Something happened."""
        for i, gate in enumerate(self._gates):
            if isinstance(gate, LearningGate):
                self._states[i] = gate.observe(self._states[i], seen)

    def refusal(self, request: Request, memory: MemoryView) -> str | None:
        """Why the request may not enter, by the first gate that objects."""
        for gate, state in zip(self._gates, self._states, strict=True):
            if (why := gate.refusal(state, request, memory)) is not None:
                return f"{type(gate).__name__}: {why}"
        return None
