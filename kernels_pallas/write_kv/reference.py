"""The oracle of write_kv: one scatter, with JAX's own rule that out-of-range writes are dropped.

In and out: the contract in `write_kv/__init__.py`. Must not know: speed.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import kv_dims


def write_kv(kv_blocks: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """See `kernels_pallas.write_kv.write_kv`."""
    block_size = kv_dims(kv_blocks.shape).block_size
    tokens = jnp.stack([k, v], axis=1)  # [T, 2, K, H]
    return kv_blocks.at[slots // block_size, :, :, slots % block_size].set(tokens, mode="drop")
