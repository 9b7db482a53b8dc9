"""What differs between the JAX versions this package runs on (0.11.2 and 0.12).

Owns: one name per difference, chosen once. Must not know: kernels.
"""

from typing import Any


def transposed(ref: Any) -> Any:
    """A Mosaic GPU reference [M, N] seen as [N, M]; nothing moves."""
    if hasattr(type(ref), "transpose"):
        return ref.transpose((1, 0))
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.transpose_ref(ref, (1, 0))  # 0.11
