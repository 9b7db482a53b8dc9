"""Who holds each block, and which of the blocks that nobody holds are still worth finding.

Owns: reference counts, and through them every hand-out and return; the order in which cached
blocks are evicted. The placement's `FreeSpace` owns the order in which free blocks are found, the
prefix cache's `Index` knows what a block contains. Must not know: requests.

    free --take--> held --release--> cached (found by content, may be evicted)  --evict--> free
                    ^ |                 |
                    | +--release------> free, if nobody could find it
                    +------ share ------+
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paxserve.eviction import BlockStats, Eviction
from paxserve.kv.rising_queue import Entry, RisingQueue
from paxserve.placement import FreeSpace, Placement
from paxserve.prefix_cache import Index


class Match(NamedTuple):
    """Blocks that were found for a prefix when `as_of` blocks had been forgotten."""

    block_ids: list[int]
    as_of: int


NO_MATCH = Match([], 0)


class BlockPool:
    """Reference-counted blocks.

    Invariant: every block but the null block 0 is free, held or cached, and in one of these only:
    num_free + num_held + num_cached + 1 == num_blocks. `ref_count(b)` is the number of block
    tables that hold b; `num_extra_refs` is the sum of ref_count - 1 over held blocks. A cached
    block is indexed. `largest_table` is the longest one that an empty pool has a place for.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        placement: Placement,
        new_index: Callable[[], Index],
        eviction: Eviction,
    ) -> None:
        self.num_blocks = num_blocks
        self.free_space = placement.open(num_blocks)
        self.index = new_index()
        self._new_index = new_index
        self.largest_table = _largest_table(self.free_space, num_blocks - 1)
        self.num_extra_refs = 0
        self.num_evicted = 0
        self._eviction = eviction
        self._ref_counts = [0] * num_blocks
        self._num_hits = [0] * num_blocks
        self._num_releases = 0
        self._num_forgotten = 0
        self._forgotten_at = [0] * num_blocks
        self._cached: dict[int, Entry] = {}  # block -> its one valid entry in the queue
        self._queue = RisingQueue()  # of (*key, block)

    @property
    def num_free(self) -> int:
        """Blocks without holder or content."""
        return self.free_space.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, with content that can be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free, or to be evicted."""
        return self.free_space.num_free + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - 1 - self.num_available

    @property
    def cached(self) -> list[int]:
        """The cached blocks."""
        return list(self._cached)

    def ref_count(self, block_id: int) -> int:
        """Tables that hold the block."""
        return self._ref_counts[block_id]

    def num_unheld(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks nobody holds: sharing them makes that many fewer available."""
        counts = self._ref_counts
        return sum([not counts[block_id] for block_id in block_ids])

    # Hand out and take back.

    def take(self, num_blocks: int) -> list[int] | None:
        """Blocks for a new table, or None; a refusal changes nothing."""
        if not self._make_free(num_blocks):
            return None
        return self._claim(self.free_space.take(num_blocks))

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        """More blocks for a table that already holds some, or None; a refusal changes nothing."""
        if not self._make_free(num_blocks):
            return None
        return self._claim(self.free_space.extend(block_table, num_blocks))

    def share(self, block_ids: Sequence[int], *, is_hit: bool = False) -> None:
        """One more table holds these blocks; `is_hit`: they were found in the prefix cache.

        Raises:
            RuntimeError: a block is neither held nor cached.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id]:
                self.num_extra_refs += 1
            elif self._cached.pop(block_id, None) is None:
                raise RuntimeError(f"block {block_id} is shared, but neither held nor cached")
            self._ref_counts[block_id] += 1
            self._num_hits[block_id] += is_hit

    def release(self, block_ids: Sequence[int]) -> None:
        """One table lets go of these blocks.

        Raises:
            RuntimeError: a block is named twice, is the null block, or is held by nobody.
        """
        counts = self._ref_counts
        wrong = [b for b in block_ids if b == 0 or counts[b] < 1]
        if wrong or len(set(block_ids)) != len(block_ids):
            raise RuntimeError(
                f"release of blocks that are not held once each: {list(block_ids)}, "
                f"null or unreferenced among them: {wrong}"
            )
        self._num_releases += 1
        index, num_hits, cached = self.index, self._num_hits, self._cached
        unheld = []
        for block_id in block_ids:
            counts[block_id] -= 1
            if counts[block_id]:
                self.num_extra_refs -= 1
            elif block_id in index:
                stats = BlockStats(self._num_releases, num_hits[block_id], index.depth(block_id))
                cached[block_id] = entry = (*self._eviction.key(stats), block_id)
                self._queue.push(entry)
            else:
                unheld.append(block_id)
        if unheld:
            self.free_space.give_back(unheld)
        if len(self._queue) > 2 * len(cached) + 64:  # mostly entries that are not valid now
            self._queue = RisingQueue(cached.values())

    # Content.

    def match(
        self, token_ids: Sequence[int], *, salt: str, num_blocks: int, earlier: Match = NO_MATCH
    ) -> Match:
        """The blocks that hold the longest prefix that can be found, at most `num_blocks` of them.

        Args:
            token_ids, salt, num_blocks: see `Index.match`.
            earlier: what was found for the same tokens before; of it only what has been forgotten
                since is looked for again.
        """
        known, forgotten_at = earlier.block_ids, self._forgotten_at
        gone = [i for i, block_id in enumerate(known) if forgotten_at[block_id] > earlier.as_of]
        behind = known[: min(gone, default=len(known))][:num_blocks]
        found = self.index.match(token_ids, salt=salt, num_blocks=num_blocks, behind=behind)
        return Match(found, self._num_forgotten)

    def publish(
        self, token_ids: Sequence[int], block_table: Sequence[int], *, salt: str, start: int
    ) -> list[int]:
        """Held blocks from number `start` on may be found; see `Index.insert`."""
        published = self.index.insert(token_ids, block_table, salt=salt, start=start)
        for block_id in published:
            self._num_hits[block_id] = 0
        return published

    def unpublish(self, block_ids: Sequence[int]) -> None:
        """These blocks hold nothing worth finding after all; last block of a prefix first."""
        for block_id in reversed(block_ids):
            if block_id in self.index:
                self._forget(block_id)
                if self._cached.pop(block_id, None) is not None:
                    self.free_space.give_back([block_id])

    def forget_all(self) -> None:
        """Nothing is found any more; cached blocks become free."""
        self.index = self._new_index()
        self._num_forgotten += 1
        self._forgotten_at = [self._num_forgotten] * self.num_blocks
        self.free_space.give_back(self._cached)
        self._cached.clear()
        self._queue = RisingQueue()

    def _make_free(self, num_blocks: int) -> bool:
        """Evict until so many blocks are free; without enough to evict, change nothing."""
        missing = num_blocks - self.free_space.num_free
        if missing > len(self._cached):
            return False
        while missing > 0:
            self._evict()
            missing -= 1
        return True

    def _evict(self) -> None:
        while self._queue:
            entry = self._queue.pop()
            block_id = entry[-1]
            if self._cached.get(block_id) is not entry or not self.index.may_evict(block_id):
                continue  # shared since, or it comes back when its last follower goes
            del self._cached[block_id]
            self._forget(block_id)
            self.free_space.give_back([block_id])
            self.num_evicted += 1
            return
        raise RuntimeError(f"none of {len(self._cached)} cached blocks may be evicted")

    def _forget(self, block_id: int) -> None:
        self._num_forgotten += 1
        self._forgotten_at[block_id] = self._num_forgotten
        new_leaf = self.index.remove(block_id)
        if new_leaf is not None and new_leaf in self._cached:
            self._queue.push(self._cached[new_leaf])

    def _claim(self, block_ids: list[int] | None) -> list[int] | None:
        for block_id in block_ids or ():
            if block_id == 0 or self._ref_counts[block_id]:
                raise RuntimeError(f"placement handed out block {block_id}, which is not free")
            self._ref_counts[block_id] = 1
        return block_ids


def _largest_table(space: FreeSpace, num_blocks: int) -> int:
    """The most blocks, up to `num_blocks`, that lie in some place of this free space."""
    fits = range(1, num_blocks + 1)
    return bisect_left(fits, True, key=lambda n: space.num_unfit(n) == num_blocks)
