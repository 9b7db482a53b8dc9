"""The pieces of a Llama layer: linear map, RMS norm, rotary embedding, MLP, attention.

Owns: their arithmetic, as Flax NNX modules over arrays they are given. Normalisation, rotary
phases and softmax are float32. In: activations [T, D]. Must not know: rows, blocks, sampling;
attention hands those to the kernel.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.rotary import rotate
from kernels_pallas.write_kv import write_kv
from paxserve.arrays import StepArrays
from paxserve.device.kv_blocks import Kernel, LayerKv
from paxserve.models.config import ModelConfig, RopeConfig

type Parameters = dict[str, Array]
type Rotation = tuple[Float[Array, "T h"], Float[Array, "T h"]]  # cos and sin of each token


class Linear(nnx.Module):
    """x @ weight (+ bias); summed over the mesh axis `summed_over`, where x and weight are split
    along the dimension that the product runs over.
    """

    def __init__(
        self, parameters: Parameters, name: str, *, summed_over: str | None = None
    ) -> None:
        self.weight = nnx.Param(parameters[name])
        self.summed_over = summed_over
        bias = parameters.get(f"{name}_bias")
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """Apply."""
        y = product("ti,io->to", x, self.weight[...])
        if self.summed_over is not None:
            y = jax.lax.psum(y, self.summed_over)
        return y if self.bias is None else y + self.bias[...][None, :]


def product(subscripts: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """einsum; of float32 numbers with all their bits, where a TPU would round them to bfloat16
    first, and a GPU to TF32.
    """
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision)


def embed(
    table: Float[Array, "v D"], token_ids: Int[Array, "T"], axis: str | None
) -> Float[Array, "T D"]:
    """The row of each token; with an axis, the table is a device's part of the vocabulary, and all
    but one device add zero.
    """
    if axis is None:
        return table[token_ids]
    own = token_ids - jax.lax.axis_index(axis) * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    rows = jnp.where(is_own[:, None], table[own], jnp.zeros((), table.dtype))
    return jax.lax.psum(rows, axis)


class RmsNorm(nnx.Module):
    """x / rms(x) * weight, in float32. Source: Zhang and Sennrich, NeurIPS'19."""

    def __init__(self, weight: Array, epsilon: float) -> None:
        self.weight = nnx.Param(weight)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Apply."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype) * (
            self.weight[...][None, :]
        )


class Mlp(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer, 2020."""

    def __init__(self, parameters: Parameters, prefix: str, axis: str | None) -> None:
        self.gate = Linear(parameters, f"{prefix}gate")
        self.up = Linear(parameters, f"{prefix}up")
        self.down = Linear(parameters, f"{prefix}down", summed_over=axis)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Apply."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
    """Grouped-query attention over one layer's paged KV."""

    def __init__(
        self,
        parameters: Parameters,
        prefix: str,
        config: ModelConfig,
        layer: int,
        axis: str | None,
    ) -> None:
        self.q = Linear(parameters, f"{prefix}q")
        self.k = Linear(parameters, f"{prefix}k")
        self.v = Linear(parameters, f"{prefix}v")
        self.o = Linear(parameters, f"{prefix}o", summed_over=axis)
        self.head_dim = config.head_dim
        self.window = config.layer_windows[layer]

    def __call__(
        self,
        x: Float[Array, "T D"],
        kv: LayerKv,
        rotation: Rotation,
        arrays: StepArrays,
        kernel: Kernel,
    ) -> tuple[Float[Array, "T D"], LayerKv]:
        """Write this step's K and V, then read the whole context; returns the new KV as well."""
        num_tokens = x.shape[0]
        q = rotate(self.q(x).reshape(num_tokens, -1, self.head_dim), *rotation)
        k = self.k(x).reshape(num_tokens, -1, self.head_dim)
        v = self.v(x).reshape(num_tokens, -1, self.head_dim)
        attended, kv = _write_and_attend(
            q,
            k,
            v,
            rotation,
            kv,
            arrays.slots,
            arrays.block_table,
            arrays.context_lens,
            arrays.cu_q_lens,
            arrays.num_rows,
            scale=self.head_dim**-0.5,
            sliding_window=self.window,
            kernel=kernel,
        )
        return self.o(attended.reshape(num_tokens, -1)), kv


@partial(jax.jit, static_argnames=("scale", "sliding_window", "kernel"))
def _write_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    rotation: Rotation,
    kv: LayerKv,
    slots: Int[Array, "T"],
    *table: Array,
    scale: float,
    sliding_window: int | None,
    kernel: Kernel,
) -> tuple[Float[Array, "T N H"], LayerKv]:
    """The kernels of one layer, jitted by themselves to be traced once for all layers."""
    backend, device_kind = kernel
    kv_blocks, kv_scales = write_kv(
        kv.blocks,
        k,
        v,
        slots,
        rotation=rotation,
        kv_scales=kv.scales,
        backend=backend,
        device_kind=device_kind,
    )
    attended = paged_attention(
        q,
        kv_blocks,
        *table,
        scale=scale,
        sliding_window=sliding_window,
        kv_scales=kv_scales,
        backend=backend,
        device_kind=device_kind,
    )
    return attended, LayerKv(kv_blocks, kv_scales)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, "h"]:
    """Radians per position of each of the head_dim / 2 pairs, float64.

    Source: RoFormer; for `llama3` the band-wise scaling published with Llama 3.1: wavelengths
    longer than original / low_freq_factor are divided by `factor`, those shorter than
    original / high_freq_factor are kept, those between are interpolated.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    match rope.type:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            wavelengths = 2 * math.pi / frequencies
            low, high = rope.low_freq_factor, rope.high_freq_factor
            kept = (rope.original_max_position / wavelengths - low) / (high - low)
            kept = np.clip(kept, 0.0, 1.0)
            return frequencies * (kept + (1 - kept) / rope.factor)
    raise ValueError(f"unknown rope type {rope.type!r}")


def rotation_table(
    rope: RopeConfig, *, head_dim: int, num_positions: int
) -> tuple[Float[np.ndarray, "X h"], Float[np.ndarray, "X h"]]:
    """cos and sin of every phase, computed in float64 so that far positions keep their accuracy."""
    phases = np.arange(num_positions)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return np.cos(phases).astype(np.float32), np.sin(phases).astype(np.float32)


def gather_rotation(
    table: tuple[Float[Array, "X h"], Float[Array, "X h"]], positions: Int[Array, "T"]
) -> Rotation:
    """The rows of the table for this step's tokens."""
    cos, sin = table
    return cos[positions], sin[positions]
