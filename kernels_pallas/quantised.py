"""Keys and values in eight bits: which dtypes, and how a head of one token is rounded to them.

Owns: the rounding rule that every `write_kv` keeps and every `paged_attention` undoes. One factor
per token and kv head, for K and for V: value = stored * scale. Since a scale belongs to one token,
an attention kernel never multiplies it into K or V: it multiplies the token's column of scores, and
of probabilities. In and out: arrays. Must not know: blocks, slots.
"""

import jax
import jax.numpy as jnp

INT8 = jnp.dtype(jnp.int8)
FP8 = jnp.dtype(jnp.float8_e4m3fn)
QUANTISED_DTYPES = (INT8, FP8)
_SMALLEST = float(jnp.finfo(jnp.bfloat16).tiny)


def largest(dtype: jnp.dtype) -> float:
    """The stored value that the largest magnitude of a head is mapped to: 127 or 448."""
    return float(jnp.iinfo(dtype).max if dtype == INT8 else jnp.finfo(dtype).max)


def quantise(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x [..., H] -> stored [..., H] of `dtype` and scale [...] float32.

    The scale is rounded to bfloat16 before it divides, so it loses nothing where a kernel moves it
    through 16-bit units. A head that holds NaN or an infinity gets a scale that makes it NaN again
    when it is read; a head of zeros gets scale 1.
    """
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=-1)
    scale = (most / largest(dtype)).astype(jnp.bfloat16).astype(jnp.float32)
    # Zeros; magnitudes whose scale would be subnormal count as zeros too.
    scale = jnp.where(scale < _SMALLEST, jnp.float32(1), scale)
    scale = jnp.where(jnp.isfinite(most), scale, jnp.float32(jnp.nan))
    return round_to(wide / scale[..., None], dtype), scale


def round_to(scaled: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Nearest stored value, ties to even, within +-`largest`; NaN becomes 0."""
    limit = largest(dtype)
    finite = jnp.where(jnp.isnan(scaled), jnp.float32(0), scaled)
    clipped = jnp.clip(finite, -limit, limit)
    return (jnp.round(clipped) if dtype == INT8 else clipped).astype(dtype)
