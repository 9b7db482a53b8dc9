"""The plainly right write: one token after the other, each put into its slot or dropped.

Owns: the meaning of `write_kv`. In and out: the contract in `write_kv/__init__.py`.
"""

import jax
from jax import lax
from jax import numpy as jnp

from kernels_pallas.quantised import quantise
from kernels_pallas.rotary import rotate

__all__ = ["write_kv"]


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
        return _write(kv_blocks, tokens, slots), None
    stored, scales = quantise(tokens, kv_blocks.dtype)
    return _write(kv_blocks, stored, slots), _write(kv_scales, scales, slots)


def _write(blocks: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """blocks [P, 2, K, S, ...] with each of tokens [T, 2, K, ...] in its slot."""
    num_blocks, block_size = blocks.shape[0], blocks.shape[3]

    def write(token: jax.Array, blocks: jax.Array) -> jax.Array:
        block, offset = slots[token] // block_size, slots[token] % block_size
        entry = jnp.expand_dims(tokens[token], (0, 3))  # [1, 2, K, 1, ...]
        start = (block, 0, 0, offset, *[0] * (blocks.ndim - 4))
        written = lax.dynamic_update_slice(blocks, entry, [jnp.int32(i) for i in start])
        return jnp.where(slots[token] < num_blocks * block_size, written, blocks)

    return lax.fori_loop(0, slots.shape[0], write, blocks)
