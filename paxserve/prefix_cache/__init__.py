"""Which computed blocks can be found again by their content: the protocol of the prefix_cache axis.

A prefix cache is a choice (a frozen dataclass) that opens an `Index`, the mechanism that maps
token prefixes to blocks. It knows content, never who holds a block: references and the order of
eviction are the block pool's. Only full blocks are found, from the first token on.

`publish` says when a block may be found: at `planning`, as soon as a step that computes it is
being planned (sound, since in every layer a step's KV writes precede its reads), or `after_step`.
"""

from array import array
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

type Publish = Literal["planning", "after_step"]


class Index(Protocol):
    """Invariant: a block is indexed under at most one prefix, and a prefix names one block."""

    def __len__(self) -> int:
        """Indexed blocks."""

    def __contains__(self, block_id: int) -> bool:
        """Whether this block can be found."""

    def match(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        num_blocks: int,
        behind: Sequence[int] = (),
    ) -> list[int]:
        """The blocks that hold the longest indexed prefix, at most `num_blocks` of them; tokens
        are compared, so that no two prefixes are ever taken for each other. `behind`: indexed
        blocks that are known to begin it, so that only what comes behind them is looked for.
        """

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], *, salt: str, start: int
    ) -> list[int]:
        """Blocks number `start` and on of `block_ids` are full and may be found.

        Args:
            token_ids: the sequence's tokens from its first, enough for all of `block_ids`.
            block_ids: its block table from its first block.
            salt: of the request.
            start: blocks before it were inserted already, by this or another sequence, under the
                ids they have here; where ids changed, as after a swap, it is 0.

        Returns:
            The blocks that are now indexed and were not before, in table order. A prefix that is
            indexed under another block stays there: that one is found, this one is not. Blocks
            before `start` can be among them, where the block that stood for their prefix is gone.

        Raises:
            RuntimeError: a block is still indexed under another prefix, or ids do not fit `start`.
        """

    def depth(self, block_id: int) -> int:
        """Blocks before it in its prefix; only of an indexed block."""

    def may_evict(self, block_id: int) -> bool:
        """Whether this indexed block may be removed now: an index with leaf order says no while
        it has followers.
        """

    def remove(self, block_id: int) -> int | None:
        """It is found no more. Returns the indexed block before it in its prefix, if that has
        become a leaf by this, else None.

        Raises:
            RuntimeError: it is not indexed, or may not be evicted.
        """


class PrefixCache(Protocol):
    """A way to find blocks again. `shares` is False only where nothing is ever found."""

    @property
    def shares(self) -> bool:
        """See above."""

    @property
    def publish(self) -> Publish:
        """See above."""

    def open(self, block_size: int) -> Index:
        """An empty index over blocks of `block_size` slots."""


def check_publish(publish: str) -> None:
    """Reject a time of publication that is not one of `Publish`."""
    allowed = get_args(Publish.__value__)
    if publish not in allowed:
        raise ValueError(f"publish must be one of {', '.join(allowed)}, got {publish!r}")


def check_tokens(token_ids: Sequence[int], block_ids: Sequence[int], block_size: int) -> None:
    """Reject a table that reaches beyond the known tokens."""
    if len(token_ids) < len(block_ids) * block_size:
        raise RuntimeError(
            f"{len(block_ids)} blocks of {block_size} slots cannot be full of {len(token_ids)} "
            "tokens; insert only full blocks whose tokens are all known"
        )


def block_key(token_ids: Sequence[int], number: int, *, block_size: int, salt: str) -> bytes:
    """What a block adds to the prefix before it: its tokens, 4 bytes each.

    Those of block 0 stand behind the salt, so that prefixes of two salts have nothing in common.
    The block must be full: only a fixed width keeps salt and tokens apart. An array of tokens is of
    4 bytes each already.
    """
    first = number * block_size
    block = token_ids[first : first + block_size]
    key = (block if isinstance(block, array) else array("i", block)).tobytes()
    return key if number else salt.encode("utf-8", "surrogatepass") + key
