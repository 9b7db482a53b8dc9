"""Slot-seconds per request: KV slots times the time for which it had them.

Owns: the sums of the requests that run, as columns; a request gets its own when it leaves. In: who
runs, and each step's columns. Out: `Request.live_slot_s` and its neighbours. Must not know: how
slots are counted.
"""

from collections.abc import Sequence

import numpy as np

from paxserve.request import Request


class SlotSeconds:
    """`columns` of a step are [4, requests]: slots computed, promised, held, and others that are
    summed beside them, in the order of `follow`.

    Invariant: the i-th sums are those of the i-th running request, since it last entered or was
    handed what it had.
    """

    def __init__(self) -> None:
        self._members: list[Request] = []
        self._slot_s = np.zeros((4, 0))

    def follow(self, running: list[Request]) -> bool:
        """Whether the same requests run as before; if not, those that left get what is theirs, and
        those that came begin at none. Running requests stand in order of admission, so one that
        left and came back stands behind those that stayed.
        """
        if running == self._members:
            return True
        stays, num_kept = np.zeros(len(self._members), bool), 0
        for place, request in enumerate(self._members):
            if num_kept < len(running) and running[num_kept] is request:
                stays[place] = True
                num_kept += 1
        self._hand_out((~stays).nonzero()[0].tolist())
        entered = np.zeros((4, len(running) - num_kept))
        self._slot_s = np.concatenate([self._slot_s[:, stays], entered], axis=1)
        self._members = list(running)
        return False

    def spend(self, columns: np.ndarray, duration_s: float) -> None:
        """A step took so long."""
        self._slot_s += columns * duration_s

    def spend_run(self, columns: np.ndarray, durations_s: np.ndarray) -> None:
        """Several steps, [steps, 4, requests], added up one after the other as `spend` does."""
        own = columns * durations_s[:, None, None]
        self._slot_s = np.add.accumulate(np.concatenate([self._slot_s[None], own]))[-1]

    def settle(self) -> None:
        """Every request gets what is its own so far."""
        self._hand_out(range(len(self._members)))
        self._members, self._slot_s = [], np.zeros((4, 0))

    def close(self, request: Request) -> None:
        """One that has left gets what is its own."""
        if request in self._members:
            place = self._members.index(request)
            self._hand_out([place])
            self._slot_s[:, place] = 0

    def _hand_out(self, places: Sequence[int]) -> None:
        for i in places:
            request = self._members[i]
            live, promised, held, _ = self._slot_s[:, i].tolist()
            request.live_slot_s += live
            request.promised_slot_s += promised
            request.held_slot_s += held
