"""Llama as a Flax NNX module: token ids and paged KV in, final hidden states and new KV out.

Owns: the order of layers, and the way from parameters by name to modules. In: the arrays of one
step, the KV of each layer. Out: the same, one step further. Must not know: sampling, jit.

Layers are unrolled, not scanned: on CPU a scan over stacked weights copies every weight every step.
"""

import jax
from flax import nnx
from jax import numpy as jnp
from jaxtyping import Array, Float

from paxserve.arrays import StepArrays
from paxserve.device.kv_blocks import Kernel, Kv
from paxserve.device.layers import (
    Attention,
    Mlp,
    Parameters,
    RmsNorm,
    embed,
    gather_rotation,
    product,
    rotation_table,
)
from paxserve.models.config import ModelConfig


class Layer(nnx.Module):
    """One decoder layer, normalised before each half."""

    def __init__(
        self, parameters: Parameters, config: ModelConfig, layer: int, axis: str | None
    ) -> None:
        prefix, epsilon = f"layers.{layer}.", config.rms_norm_eps
        self.attention_norm = RmsNorm(parameters[f"{prefix}attention_norm"], epsilon)
        self.attention = Attention(parameters, prefix, config, layer, axis)
        self.mlp_norm = RmsNorm(parameters[f"{prefix}mlp_norm"], epsilon)
        self.mlp = Mlp(parameters, prefix, axis)


class Llama(nnx.Module):
    """The whole model.

    Args:
        config: its dimensions.
        parameters: one array per name of `parameter_shapes(config)`.
        max_model_len: positions to prepare rotary phases for.
        axis: the mesh axis over which `paxserve.device.sharding` splits the parameters; the methods
            then run on one device's part. None: on the whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        max_model_len: int,
        axis: str | None = None,
    ) -> None:
        self.axis = axis
        self.embed = nnx.Param(parameters["embed"])
        self.layers = nnx.List(
            [Layer(parameters, config, i, axis) for i in range(config.num_layers)]
        )
        self.final_norm = RmsNorm(parameters["final_norm"], config.rms_norm_eps)
        head = parameters.get("lm_head")
        self.lm_head = None if head is None else nnx.Param(head)
        cos, sin = rotation_table(
            config.rope, head_dim=config.head_dim, num_positions=max_model_len
        )
        self.cos, self.sin = nnx.Param(jnp.asarray(cos)), nnx.Param(jnp.asarray(sin))

    def hidden(
        self, token_ids: Array, kv: Kv, arrays: StepArrays, *, kernel: Kernel
    ) -> tuple[Float[Array, "T D"], Kv]:
        """Run all layers; `token_ids` [T] are resolved (none is -1)."""
        x = embed(self.embed[...], token_ids, self.axis)
        rotation = gather_rotation((self.cos[...], self.sin[...]), arrays.positions)
        new_kv = []
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            normed = layer.attention_norm(x)
            attended, layer_kv = layer.attention(normed, layer_kv, rotation, arrays, kernel)
            x = x + attended
            x = x + layer.mlp(layer.mlp_norm(x))
            new_kv.append(layer_kv)
        return x, tuple(new_kv)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Logits of some tokens, float32."""
        normed = self.final_norm(hidden)
        if self.lm_head is None:
            scores = product("rd,vd->rv", normed, self.embed[...])
        else:
            scores = product("rd,dv->rv", normed, self.lm_head[...])
        if self.axis is not None:
            scores = jax.lax.all_gather(scores, self.axis, axis=1, tiled=True)
        return scores.astype(jnp.float32)
