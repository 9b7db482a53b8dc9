"""Who holds each block from which step on: the log behind the block map.

Owns: the changes from step to step. In: the batch, once per executed step, before its results are
applied, as the ledger sees it. Out: `BlockChange`s. Must not know: policies, files, pictures.

It looks at every block after every step, which costs as much as a small step itself: it is kept
only when a run asks for it (`record_blocks=true`).
"""

from typing import NamedTuple

from paxserve.batch import Batch


class BlockChange(NamedTuple):
    """From `step_id` on, `block_id` is of this `kind`: live, held (by a finished request), cached,
    free, or host (swapped out). Blocks of the host's pool count on from the device's. `holder` is
    the request, of a shared block the first that runs; empty where there is none.
    """

    step_id: int
    block_id: int
    holder: str
    kind: str


_FREE = ("", "free")


class BlockLog:
    """Invariant: replaying `changes`, all blocks free at first, gives the blocks as last seen."""

    def __init__(self, batch: Batch) -> None:
        self.changes: list[BlockChange] = []
        self._batch = batch
        self._last: dict[int, tuple[str, str]] = {}

    def record(self, step_id: int) -> None:
        """What has changed since the step before."""
        now = self._blocks()
        for block_id in sorted(now.keys() | self._last.keys()):
            state = now.get(block_id, _FREE)
            if state != self._last.get(block_id, _FREE):
                self.changes.append(BlockChange(step_id, block_id, *state))
        self._last = now

    def _blocks(self) -> dict[int, tuple[str, str]]:
        """Blocks that are not free."""
        batch, found = self._batch, dict[int, tuple[str, str]]()
        dead = [(batch.by_sequence[s.sequence_id][0], s) for s in batch.dead]
        dead += [(request, s) for request in batch.finished for s in request.live]
        running = [(request, s) for request in batch.running for s in request.live]
        for kind, holders in (("live", running), ("held", dead)):
            for request, sequence in holders:
                for block_id in sequence.block_table:
                    found.setdefault(block_id, (request.request_id, kind))
        found |= dict.fromkeys(batch.pool.cached, ("", "cached"))
        for request in batch.requests.values():
            for sequence in request.sequences:
                for host_id in sequence.host_blocks:
                    found.setdefault(
                        self._batch.limits.num_blocks + host_id, (request.request_id, "host")
                    )
        return found
