"""What differs between the JAX versions this package runs on (0.11.2 and 0.12).

Owns: one name per difference. In and out: references and arrays inside a Mosaic GPU kernel. Must
not know: kernels.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any  # a reference to device memory: Pallas gives them no public type


def transposed(ref: Ref) -> Ref:
    """A reference [M, N] seen as [N, M]; nothing moves. 0.11 has a function, 0.12 a method."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))


def store(ref: Ref, value: jax.Array) -> None:
    """Store where bank conflicts cannot be avoided. 0.12 refuses that unless told; 0.11 does it."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
