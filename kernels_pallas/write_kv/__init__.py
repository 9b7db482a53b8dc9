"""Writing a step's keys and values into the paged KV cache: contract and choice of backend.

Owns: the signature and its static validation. In: one layer's KV array, the step's K and V, one
slot per token. Out: the array with those slots replaced. Must not know: requests, block tables (a
slot already says block and offset), the layout of the array (the backend shares the attention
backend's).
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import kv_dims
from kernels_pallas.write_kv import reference, xla

__all__ = ["BACKENDS", "backend_module", "write_kv"]

_MODULES: dict[str, ModuleType] = {"reference": reference, "xla": xla}
_PLANNED = ("pallas_tpu", "pallas_gpu")
BACKENDS: tuple[str, ...] = tuple(_MODULES)


def backend_module(backend: str) -> ModuleType:
    """The module behind a backend name: it exports `write_kv`.

    Raises:
        NotImplementedError: a planned backend that does not exist yet.
        ValueError: an unknown name.
    """
    if backend in _PLANNED:
        raise NotImplementedError(f"write_kv {backend=} does not exist yet; use one of {BACKENDS}")
    if backend not in _MODULES:
        raise ValueError(f"write_kv {backend=} is unknown; use one of {BACKENDS}")
    return _MODULES[backend]


def write_kv(
    kv_blocks: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str
) -> jax.Array:
    """Put each token's key and value into its slot.

    Args:
        kv_blocks: one layer's KV array, `kv_shape(P, S, K, H)` of the attention backend.
        k: [T, K, H] keys of the step, rotary applied, dtype of kv_blocks.
        v: [T, K, H] values of the step.
        slots: [T] int32, block_id * S + offset. A slot >= P * S is dropped: that is padding. No
            two real tokens may share a slot (the result would be either one).
        backend: one of `BACKENDS`, the same name as the attention backend.
    Returns:
        The array with the slots replaced, every other slot untouched.
    Raises:
        ValueError: shapes or dtypes disagree, or an unknown backend.
    Donates: nothing itself; where the caller's jit donates kv_blocks the write is in place.
    """
    dims = kv_dims(kv_blocks.shape)
    expected = (k.shape[0], dims.num_kv_heads, dims.head_dim)
    if k.shape != expected or v.shape != expected or slots.shape != k.shape[:1]:
        raise ValueError(
            f"k and v must be [T, K, H] and slots [T] for kv_blocks={kv_blocks.shape}; got "
            f"k={k.shape}, v={v.shape}, slots={slots.shape}"
        )
    if not k.dtype == v.dtype == kv_blocks.dtype or slots.dtype != jnp.int32:
        raise ValueError(
            "k and v must have the dtype of kv_blocks and slots int32; got "
            f"k={k.dtype}, v={v.dtype}, kv_blocks={kv_blocks.dtype}, slots={slots.dtype}"
        )
    out: jax.Array = backend_module(backend).write_kv(kv_blocks, k, v, slots)
    return out
