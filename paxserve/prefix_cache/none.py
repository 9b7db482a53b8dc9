"""Nothing is found again: every prompt is computed in full.

Source: none; it is what PagedAttention does before sharing is added (vLLM's
`enable_prefix_caching=False`), and the baseline that the other indexes are compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paxserve.prefix_cache import Index, Publish


class _Nothing:
    """Invariant: no block is indexed."""

    def __len__(self) -> int:
        return 0

    def __contains__(self, block_id: int) -> bool:
        return False

    def match(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        num_blocks: int,
        behind: Sequence[int] = (),
    ) -> list[int]:
        return []

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], *, salt: str, start: int
    ) -> list[int]:
        return []

    def depth(self, block_id: int) -> int:
        raise RuntimeError(f"block {block_id} is not indexed: there is no prefix cache")

    def may_evict(self, block_id: int) -> bool:
        raise RuntimeError(f"block {block_id} is not indexed: there is no prefix cache")

    def remove(self, block_id: int) -> int | None:
        raise RuntimeError(f"block {block_id} is not indexed: there is no prefix cache")


@dataclass(frozen=True, slots=True)
class NoCache:
    """No prefix cache."""

    shares = False
    publish: ClassVar[Publish] = "after_step"

    def open(self, block_size: int) -> Index:
        """See `PrefixCache.open`."""
        return _Nothing()
