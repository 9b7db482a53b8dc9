"""The KV cache on the device: one array per layer, its shape given by the attention backend.

Owns: which kernel reads it, allocation and size, on one device or split by kv heads over a group.
Must not know: which block belongs to whom (that is `paxserve/kv/`).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from kernels_pallas.paged_attention import backend_module
from kernels_pallas.quantised import FP8, INT8
from paxserve.device.sharding import AXIS
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
    """Everything that fixes the shapes of one device's cache but its number of blocks.

    config: the model, or a device's share of it (`sharding.share`).
    """

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
        return sum(
            math.prod(array.shape) * array.dtype.itemsize
            for array in jax.tree.leaves(self.arrays(1))
        )

    def arrays(self, num_blocks: int, *, mesh: Mesh | None = None) -> Kv:
        """Shape, dtype and sharding of every array; over a mesh, those of its devices side by side
        along the axis that the backend names.
        """
        layout = backend_module(self.backend).LAYOUT
        config, size = self.config, self.block_size
        values = layout.kv_shape(num_blocks, size, config.num_kv_heads, config.head_dim)
        scales = layout.kv_scales_shape(num_blocks, size, config.num_kv_heads)
        layer = LayerKv(
            _over(mesh, layout.KV_HEADS_AXIS, values, self.dtype),
            _over(mesh, layout.SCALES_HEADS_AXIS, scales, jnp.dtype(jnp.float32))
            if self.is_quantised
            else None,
        )
        return (layer,) * config.num_layers

    def allocate(self, num_blocks: int, *, fill: float = 0.0, mesh: Mesh | None = None) -> Kv:
        """Fresh arrays, each its own buffer; tests fill them with NaN (scales, where int8)."""

        def full(array: jax.ShapeDtypeStruct) -> Array:
            value = 0 if array.dtype in QUANTISED.values() else fill
            return jnp.full(array.shape, value, array.dtype, device=array.sharding)

        return jax.tree.map(full, self.arrays(num_blocks, mesh=mesh))


def _over(mesh: Mesh | None, axis: int, shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """A `jax.ShapeDtypeStruct` of an array of which every device of the mesh holds `shape`."""
    if mesh is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    whole = (*shape[:axis], shape[axis] * mesh.size, *shape[axis + 1 :])
    spec = PartitionSpec(*[AXIS if i == axis else None for i in range(len(shape))])
    return jax.ShapeDtypeStruct(whole, dtype, sharding=NamedSharding(mesh, spec))


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
