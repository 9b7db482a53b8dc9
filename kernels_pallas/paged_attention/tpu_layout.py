"""How K and V of one layer lie on a TPU: the layout `[P, K, S, 2H]`.

Owns: that shape, that of the scales, and the way from and to the plain layout (`layout.py`). K and
V of a token stand side by side in the lanes, so that head_dim 64 fills the 128 lanes of a tile, and
one copy brings K and V of all heads of a block. Heads are outside slots: a kv head of a block is a
`[S, 2H]` matrix in whole tiles.

Scales are `[P, S / 16, 1, X]`: a run of 16 slots has its factors in one row of lanes, kv head k's
16 of K from lane 16 * k on, those of V from lane 16 * (K + k) on. X is 32 * K rounded up to whole
tiles of 128 lanes, which costs padding only below 4 kv heads. Must not know: rows, tables.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import KvDims

LANES = 128
SCALE_RUN = 16  # slots whose scales share a row of lanes
KV_HEADS_AXIS = 1  # of kv_blocks
SCALES_HEADS_AXIS = 3  # of kv_scales


def kv_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's KV array: `[P, K, S, 2H]`."""
    return (num_blocks, num_kv_heads, block_size, 2 * head_dim)


def kv_dims(shape: tuple[int, ...]) -> KvDims:
    """The inverse of `kv_shape`.

    Raises:
        ValueError: the shape is not `[P, K, S, 2H]`.
    """
    if len(shape) != 4 or shape[3] % 2:
        raise ValueError(f"kv_blocks must have shape [P, K, S, 2H], got {shape=}")
    num_blocks, num_kv_heads, block_size, double = shape
    return KvDims(num_blocks, block_size, num_kv_heads, double // 2)


def kv_scales_shape(
    num_blocks: int, block_size: int, num_kv_heads: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's scales, where the cache is quantised: `[P, S / 16, 1, X]`."""
    lanes = -(-2 * num_kv_heads * SCALE_RUN // LANES) * LANES
    return (num_blocks, -(-block_size // SCALE_RUN), 1, lanes)


def lay_kv(plain: jax.Array) -> jax.Array:
    """A plain `[P, 2, K, S, H]` as this layout has it."""
    return jnp.concatenate([plain[:, 0], plain[:, 1]], axis=-1)


def plain_kv(kv_blocks: jax.Array) -> jax.Array:
    """The inverse of `lay_kv`."""
    return jnp.stack(jnp.split(kv_blocks, 2, axis=-1), axis=1)


def lay_scales(plain: jax.Array) -> jax.Array:
    """Plain scales `[P, 2, K, S]`, S a multiple of 16, as this layout has them; zeros pad."""
    num_blocks, _, num_kv_heads, block_size = plain.shape
    shape = kv_scales_shape(num_blocks, block_size, num_kv_heads)
    runs = plain.reshape(num_blocks, 2 * num_kv_heads, shape[1], SCALE_RUN).swapaxes(1, 2)
    rows = runs.reshape(num_blocks, shape[1], 1, -1)
    return jnp.pad(rows, [(0, 0)] * 3 + [(0, shape[3] - rows.shape[3])])


def plain_scales(kv_scales: jax.Array, dims: KvDims) -> jax.Array:
    """The inverse of `lay_scales`, for blocks of these counts."""
    num_blocks, block_size, num_kv_heads, _ = dims
    rows = kv_scales[..., : 2 * num_kv_heads * SCALE_RUN]
    runs = rows.reshape(num_blocks, -1, 2 * num_kv_heads, SCALE_RUN).swapaxes(1, 2)
    return runs.reshape(num_blocks, 2, num_kv_heads, block_size)
