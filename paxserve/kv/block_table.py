"""The block tables of requests: memory promised, found, and let go, all or nothing.

Owns: the rule that joins reservation (how much) and placement (where, through the pool).
In: a request and how many of its tokens must have a slot. Out: True, or False and nothing changed.
Must not know: who is preempted when the answer is False.

One sequence's table, in slots:

    |<-- computed -->|<-- reserved ahead -->|<- tail ->|<-- rounding of the placement -->|
    |<----------- num_reserved_tokens ----->|          |
    |<------------- whole blocks needed -------------->|
    |<------------------- len(block_table) * block_size -------------------------------->|
"""

from paxserve.kv.block_pool import BlockPool
from paxserve.limits import Limits
from paxserve.request import Request, Sequence
from paxserve.reservation import Reservation


class BlockTables:
    """Invariant: a table covers its promise, `len(table) * block_size >= num_reserved_tokens`."""

    def __init__(self, *, pool: BlockPool, reservation: Reservation, limits: Limits) -> None:
        self.pool = pool
        self.reservation = reservation
        self._limits = limits

    def num_blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks per sequence that `num_tokens` of the request ask for under the reservation."""
        return -(-self._promise(request, num_tokens) // self._limits.block_size)

    def hold(self, request: Request, num_tokens: int) -> bool:
        """Give every sequence of the request slots for its first `num_tokens` tokens."""
        promise = self._promise(request, num_tokens)
        grown: list[tuple[Sequence, int, int]] = []
        for sequence in request.sequences:
            before = len(sequence.block_table)
            if not self._grow(sequence, -(-promise // self._limits.block_size)):
                for done, num_blocks, num_reserved in grown:
                    self.pool.release(done.block_table[num_blocks:])
                    del done.block_table[num_blocks:]
                    done.num_reserved_tokens = num_reserved
                return False
            grown.append((sequence, before, sequence.num_reserved_tokens))
            sequence.num_reserved_tokens = max(promise, sequence.num_reserved_tokens)
        return True

    def let_go(self, request: Request) -> None:
        """Give back every block of the request."""
        for sequence in request.sequences:
            self.pool.release(sequence.block_table)
            sequence.block_table.clear()
            sequence.num_reserved_tokens = 0

    def _promise(self, request: Request, num_tokens: int) -> int:
        promise = self.reservation.num_tokens(request, num_needed=num_tokens, limits=self._limits)
        if promise < num_tokens:
            raise RuntimeError(
                f"{type(self.reservation).__name__} promised {promise} tokens to "
                f"{request.request_id}, which needs {num_tokens}"
            )
        return promise

    def _grow(self, sequence: Sequence, num_blocks: int) -> bool:
        table = sequence.block_table
        missing = num_blocks - len(table)
        if missing <= 0:
            return True
        found = self.pool.extend(table, missing) if table else self.pool.take(missing)
        table.extend(found or ())
        return found is not None
