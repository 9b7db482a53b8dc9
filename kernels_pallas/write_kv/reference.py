"""The plainly right write: one token after the other, each put into its slot or dropped.

Owns: the meaning of `write_kv`. In and out: the contract in `write_kv/__init__.py`.
"""

import jax
from jax import lax
from jax import numpy as jnp

from kernels_pallas.paged_attention.layout import kv_dims

__all__ = ["write_kv"]


def write_kv(kv_blocks: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """See `kernels_pallas.write_kv.write_kv`."""
    dims = kv_dims(kv_blocks.shape)
    num_slots = dims.num_blocks * dims.block_size

    def write(token: jax.Array, blocks: jax.Array) -> jax.Array:
        block, offset = slots[token] // dims.block_size, slots[token] % dims.block_size
        entry = jnp.stack([k[token], v[token]])[None, :, :, None, :]  # [1, 2, K, 1, H]
        start = (block, jnp.int32(0), jnp.int32(0), offset, jnp.int32(0))
        written = lax.dynamic_update_slice(blocks, entry, start)
        return jnp.where(slots[token] < num_slots, written, blocks)

    return lax.fori_loop(0, slots.shape[0], write, kv_blocks)
