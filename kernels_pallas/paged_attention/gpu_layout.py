"""How K and V of one layer lie on a Hopper GPU: the plain layout, with room in the scales.

Owns: the width of the scales, `[P, 2, K, width]`, S padded to what one copy brings. Must not know:
rows, tables.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import (
    KV_HEADS_AXIS,
    SCALES_HEADS_AXIS,
    KvDims,
    kv_dims,
    kv_shape,
    lay_kv,
    plain_kv,
)

__all__ = [
    "KV_HEADS_AXIS",
    "SCALES_HEADS_AXIS",
    "kv_dims",
    "kv_scales_shape",
    "kv_shape",
    "lay_kv",
    "lay_scales",
    "plain_kv",
    "plain_scales",
    "scale_width",
]


def scale_width(run: int) -> int:
    """Scales that one head's run of tokens takes in memory: a copy brings 128 bytes at least."""
    return max(run, 32)


def kv_scales_shape(
    num_blocks: int, block_size: int, num_kv_heads: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's scales: `[P, 2, K, width]`."""
    return (num_blocks, 2, num_kv_heads, scale_width(block_size))


def lay_scales(plain: jax.Array) -> jax.Array:
    """Plain scales `[P, 2, K, S]` as this layout has them; what is padded is never read."""
    missing = scale_width(plain.shape[-1]) - plain.shape[-1]
    return jnp.pad(plain, ((0, 0), (0, 0), (0, 0), (0, missing)))


def plain_scales(kv_scales: jax.Array, dims: KvDims) -> jax.Array:
    """The inverse of `lay_scales`, for blocks of these counts."""
    return kv_scales[..., : dims.block_size]
