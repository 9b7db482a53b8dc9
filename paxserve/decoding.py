"""Decodes granted in bulk: the path of nearly every token.

Owns: the questions that are asked of all requests at once where nobody can be refused. In: running
requests. Out: rows in the step's draft, or that it is not sure. Must not know: what then happens
one by one (`planning.py`).
"""

from collections.abc import Sequence

import numpy as np

from paxserve.batch import Batch
from paxserve.draft import StepDraft
from paxserve.events import EventLog, Kind
from paxserve.policies import Policies
from paxserve.request import Request, State
from paxserve.request import Sequence as TokenSequence
from paxserve.step import Rows


class Decoding:
    """Works on one step's draft."""

    def __init__(
        self, *, batch: Batch, policies: Policies, draft: StepDraft, events: EventLog
    ) -> None:
        self._batch = batch
        self._draft = draft
        self._events = events
        self._is_contiguous = policies.placement.contiguous
        cache = policies.prefix_cache
        self._publishes = cache.shares and cache.publish == "planning"

    def decode(self, requests: Sequence[Request]) -> int | None:
        """One token for each; returns how many. None where that is not sure, or an answer is not
        the usual one; then what it may have done so far is only to give blocks to some of them.
        """
        draft, batch = self._draft, self._batch
        num, block_size = len(requests), batch.limits.block_size
        if not num or num > draft.budget_left or batch.groups:
            return None if num else 0
        sequences = [request.sequences[0] for request in requests]
        # All that run, and none that has not come to what it sampled in its row: all decode.
        is_all = not draft.rows and not batch.begun and list(requests) == batch.running
        if not is_all and not self._are_usual(requests, sequences):
            return None
        positions = [sequence.num_computed_tokens for sequence in sequences]
        decodes = Rows.decodes(
            [sequence.sequence_id for sequence in sequences],
            [sequence.row for sequence in sequences],
            positions,
        )
        offsets = decodes.firsts % block_size
        if not self._grow([requests[i] for i in _places(offsets, 0)]):
            return None
        for sequence, position in zip(sequences, positions, strict=True):
            sequence.num_computed_tokens = position + 1
        draft.rows.add_decodes(decodes)
        draft.budget_left -= num
        if self._publishes:
            for i in _places(offsets, block_size - 1):
                draft.publish(batch, requests[i], sequences[i])
        return num

    def _are_usual(self, requests: Sequence[Request], sequences: list[TokenSequence]) -> bool:
        """Whether these are distinct, run, lack one token each, sampled in their rows, and were not
        granted it yet.
        """
        num, rows = len(requests), self._draft.rows
        return (
            [request.state for request in requests].count(State.RUNNING) == num
            and [sequence.num_remaining_tokens for sequence in sequences].count(1) == num
            and len(set(sequences)) == num
            and self._batch.begun.isdisjoint(sequences)
            and rows.isdisjoint([sequence.sequence_id for sequence in sequences])
        )

    def _grow(self, requests: Sequence[Request]) -> bool:
        """A block for each table that is full; False if there may be too few."""
        tables, pool = self._batch.tables, self._batch.pool
        full = [request for request in requests if tables.is_full(request)]
        if not full:
            return True
        if len(full) > pool.num_available or self._is_contiguous:
            return False
        is_grown = grow_each(self._batch, self._events, full)
        for request in full:
            (sequence,) = request.sequences
            self._draft.touched[sequence.sequence_id] = sequence
        return is_grown


def grow_each(batch: Batch, events: EventLog, full: Sequence[Request]) -> bool:
    """One more block for each of these; see `BlockTables.grow_each`. What is evicted for them is
    logged.
    """
    num_evicted = batch.pool.num_evicted
    is_grown = batch.tables.grow_each(full)
    if batch.pool.num_evicted > num_evicted:
        num_slots = (batch.pool.num_evicted - num_evicted) * batch.limits.block_size
        events.add(Kind.EVICTED, full[0].request_id, num_tokens=num_slots)
    return is_grown


def _places(offsets: np.ndarray, offset: int) -> list[int]:
    """Where `offset` stands in `offsets`."""
    places: list[int] = (offsets == offset).nonzero()[0].tolist()
    return places
