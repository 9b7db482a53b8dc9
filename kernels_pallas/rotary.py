"""Rotary position embedding of the heads of some tokens.

Owns: the rotation, in Llama's half-split order. In and out: arrays. Must not know: where phases
come from, what is done with the result; `write_kv` applies it to keys on their way into the cache.
"""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of each head, in float32.

    Args:
        x: [T, N, H].
        cos, sin: [T, H/2] float32, of each token's phases.
    Returns:
        [T, N, H] in x's dtype.
    Source: Su et al., RoFormer.
    """
    return rotate_pairs(x, cos[:, None, :], sin[:, None, :])


def rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`rotate` of any x [..., H] by phases [..., H/2] that broadcast to it."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
