"""A tree of prefixes whose edges hold runs of blocks and are split where prefixes part.

Source: RadixAttention, SGLang, Zheng et al., NeurIPS'24 (arXiv 2312.07104), section 3. Differs: the
unit is a full block, so an edge is split only between blocks; edges are not merged again when a
branch dies, as in SGLang's code. Leaves go first: only the last block of a leaf may be evicted. So
that a leaf without holder is always found, a table's blocks are indexed only behind its own: they
end where the same prefix stands under another block (SGLang moves the sequence over to that one).

    root -- [b1 b2 b3] --+-- [b4 b5]        b5 and b6 may be evicted; once both branches are gone,
                         +-- [b6]           b3 is the last of a leaf
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paxserve.prefix_cache import Index, Publish, block_key, check_publish, check_tokens


@dataclass(slots=True, eq=False)
class _Edge:
    """A run of blocks behind `parent`, and the edges behind it by the key of their first block."""

    parent: "_Edge | None"
    first_depth: int
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    followers: dict[bytes, "_Edge"] = field(default_factory=dict)


class _Tree:
    """Invariant: every edge but the root holds a block, `_places[b] == (edge, depth)` if and only
    if `edge.block_ids[depth - edge.first_depth] == b`, and `edge.followers[k].keys[0] == k`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = _Edge(None, 0)
        self._places: dict[int, tuple[_Edge, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._places

    def match(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        num_blocks: int,
        behind: Sequence[int] = (),
    ) -> list[int]:
        size = self._block_size
        found = list(behind)
        edge, offset = self._root, 0
        if found:
            edge, depth = self._indexed(found[-1])
            offset = depth - edge.first_depth + 1
        for number in range(len(found), min(num_blocks, len(token_ids) // size)):
            key = block_key(token_ids, number, block_size=size, salt=salt)
            step = _behind(edge, offset, key)
            if step is None:
                break
            edge, offset = step
            found.append(edge.block_ids[offset - 1])
        return found

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], *, salt: str, start: int
    ) -> list[int]:
        check_tokens(token_ids, block_ids, self._block_size)
        published: list[int] = []
        place = self._resume(block_ids, start)
        for number in range(start, len(block_ids)):
            if place is None:
                break  # a block held by others must not stand behind one that its holder lacks
            key = block_key(token_ids, number, block_size=self._block_size, salt=salt)
            step = _behind(*place, key)
            if step is None or step[0].block_ids[step[1] - 1] != block_ids[number]:
                self._check_free(block_ids[number])
            if step is None:
                step = self._hang(*place, key, block_ids[number])
                published.append(block_ids[number])
            is_own = step[0].block_ids[step[1] - 1] == block_ids[number]
            place = step if is_own else None
        return published

    def depth(self, block_id: int) -> int:
        return self._indexed(block_id)[1]

    def may_evict(self, block_id: int) -> bool:
        edge, _ = self._indexed(block_id)
        return edge.block_ids[-1] == block_id and not edge.followers

    def remove(self, block_id: int) -> int | None:
        edge, depth = self._indexed(block_id)
        if not self.may_evict(block_id):
            raise RuntimeError(
                f"block {block_id}, number {depth} of its prefix, has followers; remove them first"
            )
        del self._places[block_id]
        edge.block_ids.pop()
        key = edge.keys.pop()
        if not edge.keys and edge.parent is not None:
            edge = edge.parent
            del edge.followers[key]
        return edge.block_ids[-1] if edge.block_ids and not edge.followers else None

    def _resume(self, block_ids: Sequence[int], start: int) -> tuple[_Edge, int] | None:
        """An edge, and how many of its blocks are passed; None if the block before `start` is not
        indexed, since its prefix stands under another block.
        """
        if not start:
            return self._root, 0
        place = self._places.get(block_ids[start - 1])
        if place is None:
            return None
        edge, depth = place
        if depth != start - 1:
            raise RuntimeError(
                f"block {block_ids[start - 1]} was inserted as number {depth} of its table and is "
                f"now number {start - 1}; insert a table whose ids changed with start=0"
            )
        return edge, depth - edge.first_depth + 1

    def _hang(self, edge: _Edge, offset: int, key: bytes, block_id: int) -> tuple[_Edge, int]:
        """Put a block behind the first `offset` blocks of an edge: on it, if it ends there."""
        depth = edge.first_depth + offset
        if offset < len(edge.keys):
            self._split(edge, offset)
        if edge.followers or edge is self._root:
            edge.followers[key] = _Edge(edge, depth)
            edge = edge.followers[key]
        edge.keys.append(key)
        edge.block_ids.append(block_id)
        self._places[block_id] = (edge, depth)
        return edge, len(edge.keys)

    def _split(self, edge: _Edge, offset: int) -> None:
        """Move what lies behind the first `offset` blocks of an edge to an edge of its own."""
        first_depth = edge.first_depth + offset
        lower = _Edge(edge, first_depth, edge.keys[offset:], edge.block_ids[offset:])
        lower.followers, edge.followers = edge.followers, {lower.keys[0]: lower}
        for follower in lower.followers.values():
            follower.parent = lower
        for depth, block_id in enumerate(lower.block_ids, first_depth):
            self._places[block_id] = (lower, depth)
        del edge.keys[offset:], edge.block_ids[offset:]

    def _check_free(self, block_id: int) -> None:
        if block_id in self:
            raise RuntimeError(
                f"block {block_id} is indexed under another prefix, as number "
                f"{self.depth(block_id)}; remove it before it is used again"
            )

    def _indexed(self, block_id: int) -> tuple[_Edge, int]:
        if block_id not in self:
            raise RuntimeError(f"block {block_id} is not indexed")
        return self._places[block_id]


def _behind(edge: _Edge, offset: int, key: bytes) -> tuple[_Edge, int] | None:
    """One block on from the first `offset` blocks of an edge, if that block has this key."""
    if offset < len(edge.keys):
        return (edge, offset + 1) if edge.keys[offset] == key else None
    follower = edge.followers.get(key)
    return None if follower is None else (follower, 1)


@dataclass(frozen=True, slots=True)
class Radix:
    """`publish`: when a block may be found; SGLang publishes after the step."""

    publish: Publish = "after_step"

    shares = True

    def __post_init__(self) -> None:
        """Reject an unknown time."""
        check_publish(self.publish)

    def open(self, block_size: int) -> Index:
        """See `PrefixCache.open`."""
        return _Tree(block_size)
