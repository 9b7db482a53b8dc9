"""Each full block is named by a digest of everything before and in it.

Source: vLLM's automatic prefix caching (RFC vllm#2614; V1 design page "Automatic Prefix Caching"):
sha256 over the parent's digest and the block's tokens, so that one dictionary replaces a tree.
Differs: tokens and parent are compared on every hit, so a collision costs a hit, never a wrong
one. There is no leaf order, as in vLLM: a block may go before its followers, which then cannot be
reached but do no harm, and are found again once its prefix is inserted again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from paxserve.prefix_cache import Index, Publish, block_key, check_publish, check_tokens

_NO_PARENT = bytes(32)


def chain_digest(parent: bytes, key: bytes) -> bytes:
    """The name of the prefix that ends with a block of this key behind the prefix `parent`."""
    return sha256(parent + key).digest()


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix is its last block's key behind its parent; `block_id` is where it is found.
    `num_users`: blocks that stand for it in `_prefixes`, and prefixes behind it.
    """

    parent: "_Prefix | None"
    key: bytes
    digest: bytes
    depth: int
    block_id: int | None = None
    num_users: int = 0


class _Chain:
    """Invariant: a prefix is one object while anything uses it, `_by_digest[p.digest] is p`, so
    prefixes are compared by identity; b is indexed if `_prefixes[b].block_id == b`.

    `_prefixes` also keeps the prefix of a block that lost to another block of the same prefix, so
    that its sequence goes on without hashing from the start. The entry is right for as long as a
    table holds the block, and overwritten when the block is inserted anew.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes: dict[int, _Prefix] = {}
        self._by_digest: dict[bytes, _Prefix] = {}
        self._num_indexed = 0

    def __len__(self) -> int:
        return self._num_indexed

    def __contains__(self, block_id: int) -> bool:
        prefix = self._prefixes.get(block_id)
        return prefix is not None and prefix.block_id == block_id

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
        prefix = self._indexed(found[-1]) if found else None
        for number in range(len(found), min(num_blocks, len(token_ids) // size)):
            key = block_key(token_ids, number, block_size=size, salt=salt)
            prefix = self._behind(prefix, key)
            if prefix is None or prefix.block_id is None:
                break
            found.append(prefix.block_id)
        return found

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], *, salt: str, start: int
    ) -> list[int]:
        check_tokens(token_ids, block_ids, self._block_size)
        if 0 < start == len(block_ids) - 1 and self._append(token_ids, block_ids, salt):
            return [block_ids[start]]
        published: list[int] = []
        prefix, first = self._resume(block_ids, start)
        for number in range(first, len(block_ids)):
            key = block_key(token_ids, number, block_size=self._block_size, salt=salt)
            prefix = self._behind(prefix, key, create=True)
            if prefix is None:
                self._forget(block_ids[number:])
                break
            if self._enter(prefix, block_ids[number]):
                published.append(block_ids[number])
        return published

    def _append(self, token_ids: Sequence[int], block_ids: Sequence[int], salt: str) -> bool:
        """The usual insertion, on the path of every decode: one new block, whose prefix nobody has,
        behind one that is indexed. False, and nothing changed, if it is not that.
        """
        number, before, block_id = len(block_ids) - 1, block_ids[-2], block_ids[-1]
        parent = self._prefixes.get(before)
        if parent is None or parent.block_id != before or parent.depth != number - 1:
            return False
        key = block_key(token_ids, number, block_size=self._block_size, salt=salt)
        digest = chain_digest(parent.digest, key)
        if block_id in self._prefixes or digest in self._by_digest:
            return False
        prefix = self._prefixes[block_id] = self._new(parent, key, digest)
        prefix.block_id, prefix.num_users = block_id, 1
        self._num_indexed += 1
        return True

    def depth(self, block_id: int) -> int:
        return self._indexed(block_id).depth

    def may_evict(self, block_id: int) -> bool:
        return self._indexed(block_id) is not None

    def remove(self, block_id: int) -> int | None:
        self._indexed(block_id).block_id = None
        self._let_go(self._prefixes.pop(block_id))
        self._num_indexed -= 1
        return None

    def _new(self, parent: _Prefix | None, key: bytes, digest: bytes) -> _Prefix:
        depth = 0
        if parent is not None:
            parent.num_users += 1
            depth = parent.depth + 1
        prefix = self._by_digest[digest] = _Prefix(parent, key, digest, depth)
        return prefix

    def _let_go(self, prefix: _Prefix | None) -> None:
        """One user less; a prefix that nothing uses is forgotten."""
        while prefix is not None:
            prefix.num_users -= 1
            if prefix.num_users > 0:
                return
            del self._by_digest[prefix.digest]
            prefix = prefix.parent

    def _behind(
        self, parent: _Prefix | None, key: bytes, *, create: bool = False
    ) -> _Prefix | None:
        """The prefix of `key` behind `parent`; None if unknown, or another one has its digest."""
        digest = chain_digest(parent.digest if parent else _NO_PARENT, key)
        prefix = self._by_digest.get(digest)
        if prefix is None and create:
            prefix = self._new(parent, key, digest)
        is_it = prefix is not None and prefix.parent is parent and prefix.key == key
        return prefix if is_it else None

    def _resume(self, block_ids: Sequence[int], start: int) -> tuple[_Prefix | None, int]:
        """The last indexed prefix before `start`, and its number of blocks.

        From the first block on if the last one before `start` is unknown, as behind a collision.
        """
        prefix = self._prefixes.get(block_ids[start - 1]) if start else None
        if prefix is None:
            return None, 0
        if prefix.depth != start - 1:
            raise RuntimeError(
                f"block {block_ids[start - 1]} was inserted as number {prefix.depth} of its table "
                f"and is now number {start - 1}; insert a table whose ids changed with start=0"
            )
        while prefix is not None and prefix.block_id is None:
            prefix, start = prefix.parent, start - 1
        return prefix, start

    def _enter(self, prefix: _Prefix, block_id: int) -> bool:
        """Note that the block holds the prefix; whether it is the one to be found from now on."""
        earlier = self._prefixes.get(block_id)
        if earlier is not None and earlier.block_id == block_id and earlier is not prefix:
            raise RuntimeError(
                f"block {block_id} is indexed under another prefix, as number "
                f"{self.depth(block_id)}; remove it before it is used again"
            )
        prefix.num_users += 1
        self._let_go(earlier)
        self._prefixes[block_id] = prefix
        if prefix.block_id is not None:
            return False
        prefix.block_id = block_id
        self._num_indexed += 1
        return True

    def _forget(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if block_id not in self:
                self._let_go(self._prefixes.pop(block_id, None))

    def _indexed(self, block_id: int) -> _Prefix:
        prefix = self._prefixes.get(block_id)
        if prefix is None or prefix.block_id != block_id:
            raise RuntimeError(f"block {block_id} is not indexed")
        return prefix


@dataclass(frozen=True, slots=True)
class HashChain:
    """`publish`: when a block may be found."""

    publish: Publish = "planning"

    shares = True

    def __post_init__(self) -> None:
        """Reject an unknown time."""
        check_publish(self.publish)

    def open(self, block_size: int) -> Index:
        """See `PrefixCache.open`."""
        return _Chain(block_size)
