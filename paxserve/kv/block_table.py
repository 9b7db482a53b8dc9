"""The block tables of sequences: memory promised, found, shared, copied and let go.

Owns: the rule that joins reservation (how much), placement (where, through the pool) and sharing
(who may write where). In: which tokens of which sequences are to be written. Out: True, or False
and nothing changed. Must not know: who is preempted when the answer is False.

One sequence's table, in slots:

    |<-- computed -->|<-- reserved ahead -->|<- tail ->|<-- rounding of the placement -->|
    |<----------- num_reserved_tokens ----->|          |
    |<------------- whole blocks needed -------------->|
    |<------------------- len(block_table) * block_size -------------------------------->|

A block that several tables hold is never written. A sequence that would write into one first gets
a copy of its own (copy on write); the last one to hold it writes in place. Copies are carried out
at the beginning of the step, so until the step is settled each keeps a reference on its source.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from paxserve.forks import Claim, reads_again
from paxserve.kv.block_pool import BlockPool
from paxserve.limits import Limits
from paxserve.request import Request, Sequence
from paxserve.reservation import Reservation


class PendingCopy(NamedTuple):
    """`target` took the place of `source` in column `column` of a sequence's table."""

    sequence: Sequence
    column: int
    source: int
    target: int


class BlockTables:
    """Invariants: a table covers its promise, `len(table) * block_size >= num_reserved_tokens`;
    a block that the next token of a sequence is written to has one holder. `promises_ahead`: more
    was promised than asked for, at least once.
    """

    def __init__(self, *, pool: BlockPool, reservation: Reservation, limits: Limits) -> None:
        self.pool = pool
        self.reservation = reservation
        self._block_size = limits.block_size
        self._limits = limits
        self.promises_ahead = False
        self._copies: list[PendingCopy] = []
        self._num_leaving: Counter[int] = Counter()  # per block, holders that copied it away

    def num_blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks for `num_tokens` tokens of one sequence, under the reservation."""
        return -(-self._promise(request, num_tokens) // self._block_size)

    def num_missing_blocks(self, request: Request, claims: SequenceOf[Claim]) -> int:
        """New blocks that `hold` would take."""
        num_missing, num_leaving = 0, self._num_leaving.copy()
        for sequence, num_tokens in claims:
            if reads_again(sequence):
                continue
            num_held = len(sequence.block_table)
            if sequence.source is not None:
                num_held = sequence.num_computed_tokens // self._block_size
            end = sequence.num_computed_tokens + num_tokens
            num_missing += max(0, self.num_blocks_needed(request, end) - num_held)
            shared = self._shared_block(sequence, num_leaving) if num_tokens else None
            if shared is not None:
                num_leaving[shared] += 1
                num_missing += 1
        return num_missing

    def hold(self, request: Request, claims: SequenceOf[Claim]) -> bool:
        """Give every claim slots that it may write; a sequence with a source takes over the blocks
        that it shares.
        """
        if self.num_missing_blocks(request, claims) > self.pool.num_available:
            return False
        undo: list[tuple[Sequence, int, int, int]] = []
        for claim in claims:
            table, reserved = claim.sequence.block_table, claim.sequence.num_reserved_tokens
            undo.append((claim.sequence, len(table), reserved, len(self._copies)))
            if not self._hold_one(request, *claim):
                for entry in reversed(undo):
                    self._undo(*entry)
                return False
        return True

    def grow(self, request: Request, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of a sequence, as the reservation says; or False and
        nothing changed. Without regard to sharing: see `hold`.
        """
        table, promise = sequence.block_table, self._promise(request, num_tokens)
        missing = -(-promise // self._block_size) - len(table)
        if missing > 0:
            found = self.pool.extend(table, missing) if table else self.pool.take(missing)
            if found is None:
                return False
            table.extend(found)
        sequence.num_reserved_tokens = max(promise, sequence.num_reserved_tokens)
        if promise > num_tokens:
            self.promises_ahead = True
        return True

    def grow_each(self, requests: SequenceOf[Request]) -> bool:
        """One more token for each of these, whose only table is full; or False, and some may have
        got their block.
        """
        sequences = [request.sequences[0] for request in requests]
        ends = [sequence.num_computed_tokens + 1 for sequence in sequences]
        promise, limits = self.reservation.num_tokens, self._limits
        promises = [
            promise(request, num_needed=end, limits=limits)
            for request, end in zip(requests, ends, strict=True)
        ]
        if promises != ends:  # more is promised than asked for
            return all(self.grow(*each) for each in zip(requests, sequences, ends, strict=True))
        found = self.pool.take(len(requests))
        if found is None:
            return False
        for sequence, block_id, end in zip(sequences, found, ends, strict=False):
            sequence.block_table.append(block_id)
            sequence.num_reserved_tokens = end
        sequences[-1].block_table.extend(found[len(sequences) :])  # a placement may give more
        return True

    def is_full(self, request: Request) -> bool:
        """Whether the table of its only sequence has no slot for one more token."""
        (sequence,) = request.sequences
        return sequence.num_computed_tokens == len(sequence.block_table) * self._block_size

    def computed_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of its table that hold computed tokens."""
        return sequence.block_table[: -(-sequence.num_computed_tokens // self._block_size)]

    def footprint(self, request: Request) -> tuple[list[int], int]:
        """Distinct blocks with computed tokens of a request, and how many slots these fill."""
        num_filled: dict[int, int] = {}
        for sequence in request.live:
            left = sequence.num_computed_tokens
            for block_id in sequence.block_table:
                if left <= 0:
                    break
                filled = min(left, self._block_size)
                num_filled[block_id] = max(filled, num_filled.get(block_id, 0))
                left -= self._block_size
        return list(num_filled), sum(num_filled.values())

    def held_only_by(self, requests: SequenceOf[Request]) -> set[int]:
        """Blocks that nobody else holds: they become available when all of these let go."""
        tables = [sequence.block_table for request in requests for sequence in request.live]
        held = Counter([block_id for table in tables for block_id in table])
        return {b for b, num_holders in held.items() if self.pool.ref_count(b) == num_holders}

    def share(self, sequence: Sequence, block_ids: SequenceOf[int], *, is_hit: bool) -> None:
        """A sequence without blocks begins with these, which others hold or the cache has."""
        assert not sequence.block_table, sequence
        self.pool.share(block_ids, is_hit=is_hit)
        sequence.block_table.extend(block_ids)

    def let_go(self, sequence: Sequence) -> None:
        """Give back every block of a sequence, last block first: that is evicted first."""
        self.forget_copies(sequence)
        self.pool.release(sequence.block_table[::-1])
        sequence.block_table.clear()
        sequence.num_reserved_tokens = sequence.num_sent_blocks = 0
        sequence.num_published_blocks = 0

    def forget_copies(self, sequence: Sequence) -> None:
        """Copies for a sequence that is not computed in this step after all."""
        for copy in [copy for copy in self._copies if copy.sequence is sequence]:
            self._copies.remove(copy)
            self._revert(copy)

    def settle(self) -> list[PendingCopy]:
        """The step is decided: its copies, whose sources need not be kept any more."""
        copies, self._copies = self._copies, []
        for copy in copies:
            self.pool.release([copy.source])
        self._num_leaving.clear()
        return copies

    def _promise(self, request: Request, num_tokens: int) -> int:
        promise = self.reservation.num_tokens(request, num_needed=num_tokens, limits=self._limits)
        if promise < num_tokens:
            raise RuntimeError(
                f"{type(self.reservation).__name__} promised {promise} tokens to "
                f"{request.request_id}, which needs {num_tokens}"
            )
        return promise

    def _shared_block(self, sequence: Sequence, num_leaving: Counter[int]) -> int | None:
        """The block that the next token lies in, if others hold it too."""
        column = sequence.num_computed_tokens // self._block_size
        if column >= len(sequence.block_table):
            return None
        block_id = sequence.block_table[column]
        return block_id if self.pool.ref_count(block_id) - num_leaving[block_id] > 1 else None

    def _hold_one(self, request: Request, sequence: Sequence, num_tokens: int) -> bool:
        if sequence.source is not None and not sequence.block_table:
            self._take_over(sequence, sequence.source)
        if reads_again(sequence):
            return True
        if num_tokens and not self._own_last_block(sequence):
            return False
        return self.grow(request, sequence, sequence.num_computed_tokens + num_tokens)

    def _take_over(self, sequence: Sequence, source: Sequence) -> None:
        """Blocks shared with the source: all that both know, or whole blocks."""
        num_tokens = sequence.num_computed_tokens + reads_again(sequence)
        shared = source.block_table[: -(-num_tokens // self._block_size)]
        self.share(sequence, shared, is_hit=False)
        sequence.num_reserved_tokens = num_tokens

    def _own_last_block(self, sequence: Sequence) -> bool:
        source = self._shared_block(sequence, self._num_leaving)
        if source is None:
            return True
        found = self.pool.take(1)
        if found is None:
            return False
        (target,) = found
        column = sequence.num_computed_tokens // self._block_size
        sequence.block_table[column] = target
        sequence.num_sent_blocks = min(sequence.num_sent_blocks, column)
        self._copies.append(PendingCopy(sequence, column, source, target))
        self._num_leaving[source] += 1
        return True

    def _undo(
        self, sequence: Sequence, num_blocks: int, num_reserved: int, num_copies: int
    ) -> None:
        self.pool.release(sequence.block_table[num_blocks:])
        del sequence.block_table[num_blocks:]
        sequence.num_reserved_tokens = num_reserved
        while len(self._copies) > num_copies:
            self._revert(self._copies.pop())

    def _revert(self, copy: PendingCopy) -> None:
        copy.sequence.block_table[copy.column] = copy.source
        self._num_leaving[copy.source] -= 1
        self.pool.release([copy.target])
