"""write_kv in plain XLA operations: the fast path on CPU.

In and out: the contract in `write_kv/__init__.py`. Must not know: block tables.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.quantised import quantise
from kernels_pallas.rotary import rotate


def write_kv(
    kv_blocks: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    kv_scales: jax.Array | None = None,
    device_kind: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `kernels_pallas.write_kv.write_kv`."""
    del device_kind
    if rotation is not None:
        k = rotate(k, *rotation)
    tokens = jnp.stack([k, v], axis=1)  # [T, 2, K, H]
    if kv_scales is None:
        return _scatter(kv_blocks, tokens, slots), None
    stored, scales = quantise(tokens, kv_blocks.dtype)
    return _scatter(kv_blocks, stored, slots), _scatter(kv_scales, scales, slots)


def _scatter(blocks: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """blocks [P, 2, K, S, ...] with tokens [T, 2, K, ...] in their slots; past the end: dropped."""
    block_size = blocks.shape[3]
    return blocks.at[slots // block_size, :, :, slots % block_size].set(tokens, mode="drop")
