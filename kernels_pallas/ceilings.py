"""What the device at hand can do at most: bytes copied and products computed per second.

Owns: the two programs that measure it. Every share that a benchmark prints is of these, measured in
the same run. Must not know: kernels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.timing import seconds_per_call


class Ceilings(NamedTuple):
    """Of one device."""

    copy_bytes_per_s: float  # read and written bytes together
    matmul_flops_per_s: float
    matmul_dtype: str


def measure_ceilings() -> Ceilings:
    """On the default device; bfloat16 products of 8,192 on an accelerator, float32 of 1,024 on a
    CPU, whose caches a copy of 256 MiB exceeds as one of 2 GiB does an accelerator's.
    """
    is_cpu = jax.default_backend() == "cpu"
    num_bytes, size = (256 << 20, 1024) if is_cpu else (2 << 30, 8192)
    dtype = jnp.float32 if is_cpu else jnp.bfloat16
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = seconds_per_call(lambda x: x + 1.0, array, num_rounds=7)
    # Random numbers: products of zeros draw less power, and so run faster than real ones.
    matrix = jax.random.normal(jax.random.key(0), (size, size), dtype) * size**-0.5
    product = seconds_per_call(jnp.matmul, matrix.copy(), matrix, num_rounds=7)
    return Ceilings(
        copy_bytes_per_s=2 * num_bytes / copy.median_s,
        matmul_flops_per_s=2 * size**3 / product.median_s,
        matmul_dtype=jnp.dtype(dtype).name,
    )
