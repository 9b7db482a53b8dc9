"""How K and V of one layer lie in one array: the layout `[P, 2, K, S, H]`.

Owns: that shape and how to read the counts back from it. `kv_blocks[b, 0]` is the K and
`kv_blocks[b, 1]` the V of block b, heads outside slots, so that one kv head of one block is a
contiguous `[S, H]` matrix and every dot of an attention kernel takes it as it lies. The scales of a
quantised cache, `[P, 2, K, S]`, lie the same way. Shared by the reference and xla backends (and by
write_kv). This is the plain layout: a backend with another says how to lay a plain cache out in its
own, and back. Every layout counts blocks along its first axis, and says in `KV_HEADS_AXIS` and
`SCALES_HEADS_AXIS` along which axis the arrays of groups of kv heads are put side by side: that of
K heads split over n devices is n arrays of K / n. Must not know: rows, tables, contexts, devices.
"""

from typing import NamedTuple

import jax

KV_HEADS_AXIS = 2  # of kv_blocks
SCALES_HEADS_AXIS = 2  # of kv_scales


class KvDims(NamedTuple):
    """The counts of one layer's KV array."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def kv_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Shape of one layer's KV array: `[P, 2, K, S, H]`."""
    return (num_blocks, 2, num_kv_heads, block_size, head_dim)


def kv_dims(shape: tuple[int, ...]) -> KvDims:
    """The inverse of `kv_shape`.

    Raises:
        ValueError: the shape is not `[P, 2, K, S, H]`.
    """
    if len(shape) != 5 or shape[1] != 2:
        raise ValueError(f"kv_blocks must have shape [P, 2, K, S, H], got {shape=}")
    num_blocks, _, num_kv_heads, block_size, head_dim = shape
    return KvDims(num_blocks, block_size, num_kv_heads, head_dim)


def kv_scales_shape(
    num_blocks: int, block_size: int, num_kv_heads: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's scales, where the cache is quantised: `[P, 2, K, S]`."""
    return (num_blocks, 2, num_kv_heads, block_size)


def lay_kv(plain: jax.Array) -> jax.Array:
    """A plain `[P, 2, K, S, H]` as this layout has it."""
    return plain


def plain_kv(kv_blocks: jax.Array) -> jax.Array:
    """The inverse of `lay_kv`."""
    return kv_blocks


def lay_scales(plain: jax.Array) -> jax.Array:
    """Plain scales `[P, 2, K, S]` as this layout has them."""
    return plain


def plain_scales(kv_scales: jax.Array, dims: KvDims) -> jax.Array:
    """The inverse of `lay_scales`, for blocks of these counts."""
    del dims
    return kv_scales
