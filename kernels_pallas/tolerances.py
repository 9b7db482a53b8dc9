"""How far a backend may be from the answer: one table, for tests and `paxserve check-kernels`.

Owns: the numbers and the reason of each. An error of attention is the largest relative error
of any token and head, |got - expected| / |expected| as norms over the head dim, against dense
float64 attention of the same stored numbers (quantisation error is not in it).
"""

import jax.numpy as jnp

_FLOAT32, _BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

# By the dtype of q. A quantised cache adds nothing: its numbers are exact in bfloat16 (8 bits), and
# scales multiply float32 scores and probabilities.
TOLERANCES = {
    _FLOAT32: 1e-5,  # sums of up to some thousand products in another order
    _BFLOAT16: 1e-2,  # the answer's own rounding is 2^-9; probabilities are rounded once more
}

# Of the logits after a whole model, |kernel - xla| / |xla| over the vocabulary, by its dtype: every
# layer's roundings are carried on by the layers after it.
LOGIT_TOLERANCES = {
    _FLOAT32: 1e-4,  # SmolLM2's 30 layers: 1e-6 to 3e-6 between reference and xla
    # In bfloat16 xla itself is 1.8e-2 from float32 there, and so is any other right kernel, each
    # in its own direction: 2.2e-2 apart, simulated.
    _BFLOAT16: 5e-2,
}

# Of write_kv, |got - reference| / (|reference| + 1) of any number stored, scales applied, for
# bfloat16 keys and values. Rotated keys are sums of two float32 products, which a kernel may round
# in another order, so a sum near the middle of two bfloat16 numbers may become the other: a unit in
# the last place, 2^-7 of the number at most. A quantised number that is rounded to another is
# farther off, 2^-3 in fp8: no case of the checks has one.
WRITE_TOLERANCE = 2.0**-7


def tolerance(dtype: jnp.dtype) -> float:
    """The bound for queries of this dtype."""
    return TOLERANCES[jnp.dtype(dtype)]


def logit_tolerance(dtype: jnp.dtype) -> float:
    """The bound for logits of a model of this dtype."""
    return LOGIT_TOLERANCES[jnp.dtype(dtype)]
