"""How far a backend may be from the answer: one table, for tests and `paxserve check-kernels`.

Owns: the numbers and the reason of each. An error is the largest relative error of any token and
head, |got - expected| / |expected| as norms over the head dim, against dense float64 attention of
the same stored numbers (quantisation error is not in it).
"""

import jax.numpy as jnp

_FLOAT32, _BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

# By the dtype of q. A quantised cache adds nothing: its numbers are exact in bfloat16 (8 bits), and
# scales multiply float32 scores and probabilities.
TOLERANCES = {
    _FLOAT32: 1e-5,  # sums of up to some thousand products in another order
    _BFLOAT16: 1e-2,  # the answer's own rounding is 2^-9; probabilities are rounded once more
}


def tolerance(dtype: jnp.dtype) -> float:
    """The bound for queries of this dtype."""
    return TOLERANCES[jnp.dtype(dtype)]
