"""Writing a step's keys and values into the paged KV cache: contract and choice of backend.

Owns: the signature and its static validation. In: one layer's KV array, the step's K and V, one
slot per token. Out: the array with those slots replaced. Must not know: requests, block tables (a
slot already says block and offset), the layout of the array (the attention backend's of the same
name).
"""

import sys
from types import ModuleType

import jax
import jax.numpy as jnp

from kernels_pallas.hints import NotTheFunction, runs_where_it_can
from kernels_pallas.paged_attention import backend_module as attention_module
from kernels_pallas.paged_attention.validation import (
    SUPPORTED_DTYPES,
    check_arrays,
    check_device_kind,
    check_kv_dtype,
)
from kernels_pallas.tiles import Shaped
from kernels_pallas.write_kv import pallas_gpu, pallas_tpu, reference, xla

__all__ = ["BACKENDS", "backend_module", "check_supported", "write_kv"]

sys.modules[__name__].__class__ = NotTheFunction

_MODULES: dict[str, ModuleType] = {
    "reference": reference,
    "xla": xla,
    "pallas_tpu": pallas_tpu,
    "pallas_gpu": pallas_gpu,
}
BACKENDS: tuple[str, ...] = tuple(_MODULES)


def backend_module(backend: str) -> ModuleType:
    """The module behind a backend name: it exports `write_kv`, and `check_supported` where it
    refuses anything.

    Raises:
        ValueError: an unknown name.
    """
    if backend not in _MODULES:
        raise ValueError(f"write_kv {backend=} is unknown; use one of {BACKENDS}")
    return _MODULES[backend]


def check_supported(k: Shaped, kv_blocks: Shaped, *, backend: str, device_kind: str | None) -> None:
    """Whether a backend writes such keys into such a cache, from shapes and dtypes alone.

    Raises:
        ValueError: an unknown backend.
        NotImplementedError: it cannot, as the call itself would say when it is traced.
    """
    module = backend_module(backend)
    if hasattr(module, "check_supported"):
        module.check_supported(k, kv_blocks, device_kind=device_kind)


def write_kv(
    kv_blocks: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    kv_scales: jax.Array | None = None,
    backend: str,
    device_kind: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Put each token's key and value into its slot: rotated first and quantised last, where asked.

    Args:
        kv_blocks: one layer's KV array, `kv_shape(P, S, K, H)` of the attention backend.
        k: [T, K, H] keys of the step, dtype of kv_blocks, or float32 or bfloat16 where those are
            quantised.
        v: [T, K, H] values of the step, likewise.
        slots: [T] int32, block_id * S + offset. A slot >= P * S is dropped: that is padding. No
            two real tokens may share a slot (the result would be either one). T may be 0.
        rotation: cos and sin [T, H/2] float32 by which keys are still to be rotated
            (`kernels_pallas.rotary`); None: they are already.
        kv_scales: float32, `kv_scales_shape(P, S, K)`, exactly when kv_blocks are quantised
            (`kernels_pallas.quantised`).
        backend: one of `BACKENDS`, the same name as the attention backend.
        device_kind: see `paged_attention`.
    Returns:
        kv_blocks and kv_scales, both (None where none were given), with the slots replaced, every
        other slot untouched.
    Raises:
        ValueError: shapes or dtypes disagree, or an unknown backend; a Pallas backend on a CPU,
            which `kernels_pallas.interpret.interpreted` simulates.
        NotImplementedError: the backend cannot run this case.
    Donates: nothing itself; where the caller's jit donates kv_blocks the write is in place.
    """
    check_arrays(kv_blocks=kv_blocks, k=k, v=v, slots=slots, kv_scales=kv_scales)
    check_device_kind(device_kind)
    module, layout = backend_module(backend), attention_module(backend).LAYOUT
    dims = layout.kv_dims(kv_blocks.shape)
    expected = (k.shape[0], dims.num_kv_heads, dims.head_dim)
    if k.shape != expected or v.shape != expected or slots.shape != k.shape[:1]:
        raise ValueError(
            f"k and v must be [T, K, H] and slots [T] for kv_blocks={kv_blocks.shape}; got "
            f"k={k.shape}, v={v.shape}, slots={slots.shape}"
        )
    if k.dtype != v.dtype or k.dtype not in SUPPORTED_DTYPES or slots.dtype != jnp.int32:
        raise ValueError(
            "k and v must both be float32 or bfloat16 and slots int32; got "
            f"k={k.dtype}, v={v.dtype}, slots={slots.dtype}"
        )
    check_kv_dtype(k.dtype, kv_blocks, kv_scales, layout=layout)
    if rotation is not None:
        _check_rotation(rotation, num_tokens=k.shape[0], head_dim=dims.head_dim)
    if k.shape[0] == 0:
        return kv_blocks, kv_scales
    with runs_where_it_can(backend):
        out: tuple[jax.Array, jax.Array | None] = module.write_kv(
            kv_blocks, k, v, slots, rotation=rotation, kv_scales=kv_scales, device_kind=device_kind
        )
    return out


def _check_rotation(rotation: tuple[jax.Array, ...], *, num_tokens: int, head_dim: int) -> None:
    if len(rotation) != 2:
        raise ValueError(f"rotation must be cos and sin; got {len(rotation)} arrays")
    phases = (num_tokens, head_dim // 2)
    for name, array in zip(("cos", "sin"), rotation, strict=True):
        if head_dim % 2 or array.shape != phases or array.dtype != jnp.float32:
            raise ValueError(
                f"rotation must be cos and sin, float32 of shape {phases} with an even H; got "
                f"{name}={array.shape}, dtype={array.dtype}, H={head_dim}"
            )
