"""The shape of a Llama-family model, and the names and shapes of its parameters.

Owns: `ModelConfig`, `RopeConfig` and `parameter_shapes`, the one list of parameters that every
weight source (safetensors, GGUF, Orbax, random) must fill exactly once and that the device model
consumes. In: nothing. Out: plain data. Must not know: files, jax.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    `type` is the scaling: `default` (none), `linear` (positions divided by `factor`) or `llama3`
    (frequencies scaled by band; Llama 3.1 release notes). The last four fields are read by the
    scaling types only.
    """

    theta: float = 10_000.0
    type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        """Check what the frequency table divides by."""
        if not (0 < self.theta < inf and 1 <= self.factor < inf):
            raise ValueError(f"rope needs theta > 0 and factor >= 1, both finite, got {self}")
        if self.type == "llama3" and not (
            0 < self.low_freq_factor < self.high_freq_factor < inf
            and self.original_max_position > 0
        ):
            raise ValueError(
                "llama3 rope needs 0 < low_freq_factor < high_freq_factor and "
                f"original_max_position > 0, got {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and options of one decoder-only Llama-family model (Llama, Mistral, Qwen2).

    `layer_windows[i]` is the sliding window of layer i in tokens (a query at position p sees keys
    at positions > p - window), or None for full attention.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layer_windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check what every consumer relies on."""
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers"
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "mlp_size",
            "num_layers",
            "num_heads",
            "head_dim",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps must be between 0 and 1, got {self.rms_norm_eps}")
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ValueError(f"a sliding window must be at least 1 token, got {window}")
        token_ids = (
            *self.eos_token_ids,
            *(() if self.bos_token_id is None else (self.bos_token_id,)),
        )
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"bos/eos token id {token_id} is not below vocab_size={self.vocab_size}"
                )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; weights of linear maps are [in, out].

    D hidden, F mlp, N query heads, K kv heads, H head dim, V vocabulary. With tied embeddings
    there is no `lm_head`.
    """
    d, f, v = config.hidden_size, config.mlp_size, config.vocab_size
    n, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (v, d), "final_norm": (d,)}
    if not config.tie_embeddings:
        shapes["lm_head"] = (d, v)
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        shapes |= {
            layer + "attention_norm": (d,),
            layer + "q": (d, n),
            layer + "k": (d, k),
            layer + "v": (d, k),
            layer + "o": (n, d),
            layer + "mlp_norm": (d,),
            layer + "gate": (d, f),
            layer + "up": (d, f),
            layer + "down": (f, d),
        }
        if config.qkv_bias:
            shapes |= {layer + "q_bias": (n,), layer + "k_bias": (k,), layer + "v_bias": (k,)}
        if config.output_bias:
            shapes[layer + "o_bias"] = (d,)
        if config.mlp_bias:
            shapes |= {
                layer + "gate_bias": (f,),
                layer + "up_bias": (f,),
                layer + "down_bias": (d,),
            }
    return shapes
