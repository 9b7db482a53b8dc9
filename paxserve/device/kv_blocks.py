"""The KV cache on the device: one array per layer, its shape given by the attention backend.

Owns: which kernel reads it, allocation and size. Must not know: which block belongs to whom (that
is `paxserve/kv/`).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.paged_attention import backend_module
from kernels_pallas.quantised import FP8, INT8
from paxserve.models.config import ModelConfig

# What `kv_cache_dtype` may be, beside auto: the dtype of the activations.
QUANTISED = {"int8": INT8, "fp8": FP8}


class Kernel(NamedTuple):
    """Which kernels a model runs with.

    backend: a name of `kernels_pallas.paged_attention.BACKENDS`. device_kind: JAX's name of the
    device, for tuned tiles; None: those for any.
    """

    backend: str
    device_kind: str | None = None


class LayerKv(NamedTuple):
    """One layer's cache; `scales` is None unless it is quantised."""

    blocks: Array
    scales: Array | None


type Kv = tuple[LayerKv, ...]


class KvLayout(NamedTuple):
    """Everything that fixes the shapes of a cache but its number of blocks."""

    config: ModelConfig
    block_size: int
    backend: str
    dtype: jnp.dtype

    @property
    def is_quantised(self) -> bool:
        """There are scales beside the blocks."""
        return self.dtype in QUANTISED.values()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers, scales included."""
        values, scales = self._shapes(1)
        num_bytes = math.prod(values) * self.dtype.itemsize
        if self.is_quantised:
            num_bytes += math.prod(scales) * jnp.dtype(jnp.float32).itemsize
        return num_bytes * self.config.num_layers

    def allocate(self, num_blocks: int, *, fill: float = 0.0) -> Kv:
        """Fresh arrays, each its own buffer; tests fill them with NaN (scales, where int8)."""
        values, scales = self._shapes(num_blocks)
        stored = 0 if self.is_quantised else fill
        return tuple(
            LayerKv(
                jnp.full(values, stored, self.dtype),
                jnp.full(scales, fill, jnp.float32) if self.is_quantised else None,
            )
            for _ in range(self.config.num_layers)
        )

    def _shapes(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        module, config = backend_module(self.backend), self.config
        heads, size = config.num_kv_heads, self.block_size
        return (
            module.kv_shape(num_blocks, size, heads, config.head_dim),
            module.kv_scales_shape(num_blocks, size, heads),
        )


def kv_dtype(kv_cache_dtype: str, activations: str) -> jnp.dtype:
    """The dtype behind the setting.

    Raises:
        ValueError: an unknown setting.
    """
    if kv_cache_dtype == "auto":
        return jnp.dtype(activations)
    if kv_cache_dtype not in QUANTISED:
        raise ValueError(f"kv_cache_dtype must be auto, int8 or fp8, got {kv_cache_dtype!r}")
    return QUANTISED[kv_cache_dtype]
