"""The KV cache on the device: one array per layer, its shape given by the attention backend.

Owns: allocation and size. Must not know: which block belongs to whom (that is `paxserve/kv/`).
"""

import math

import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.paged_attention import backend_module
from paxserve.models.config import ModelConfig


def kv_shape(
    config: ModelConfig, *, num_blocks: int, block_size: int, backend: str
) -> tuple[int, ...]:
    """Shape of one layer's array."""
    shape: tuple[int, ...] = backend_module(backend).kv_shape(
        num_blocks, block_size, config.num_kv_heads, config.head_dim
    )
    return shape


def bytes_per_block(config: ModelConfig, *, block_size: int, backend: str, dtype: str) -> int:
    """Bytes of one block in all layers."""
    shape = kv_shape(config, num_blocks=1, block_size=block_size, backend=backend)
    return math.prod(shape) * jnp.dtype(dtype).itemsize * config.num_layers


def allocate(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    backend: str,
    dtype: str,
    fill: float = 0.0,
) -> tuple[Array, ...]:
    """Fresh arrays, each its own buffer; tests fill them with NaN."""
    shape = kv_shape(config, num_blocks=num_blocks, block_size=block_size, backend=backend)
    return tuple(jnp.full(shape, fill, dtype) for _ in range(config.num_layers))
