"""A GGUF file to our configuration, parameters and tokenizer metadata.

Owns: the metadata keys of the `llama` and `qwen2` architectures, and undoing the row order GGUF
uses for rotary embeddings. In: a path. Out: a `GgufModel`. Must not know: jax, how tokenizers
work.

Mistral files carry the architecture `llama`. The converter of llama.cpp stores the query and key
rows of `llama` files interleaved (pairs 2i, 2i+1 are rotated together); our model rotates halves,
so these rows are put back, per head. `qwen2` files are stored as ours already.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.models.config import ModelConfig, RopeConfig, parameter_shapes
from paxserve.models.gguf_file import GgufFile, open_gguf
from paxserve.models.parameter_names import gguf_names, is_linear
from paxserve.models.parameters import (
    Array,
    check_names,
    check_shape,
    parameter_dtype,
    to_parameter,
)

ARCHITECTURES = ("llama", "qwen2")
ROPE_FREQS = "rope_freqs.weight"

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """What one GGUF file holds; `metadata` is for the tokenizer."""

    config: ModelConfig
    parameters: dict[str, Array]
    metadata: dict[str, Any]


def read_gguf(path: Path, *, dtype: str = "float32") -> GgufModel:
    """Read a model; tensors are de-quantised one by one from the mapped file.

    Args:
        path: the file.
        dtype: float32 or bfloat16.

    Raises:
        ValueError: no GGUF file, damaged, an unsupported architecture, rotary scaling or
            quantisation, or tensors that do not fit the metadata.
    """
    as_dtype = parameter_dtype(dtype)
    file, config = _opened(path)
    names, shapes = gguf_names(config), parameter_shapes(config)
    check_names([n for n in file.tensors if n != ROPE_FREQS], names, source=str(path))
    permuted = file.metadata["general.architecture"] == "llama"
    parameters = {}
    for gguf_name, name in names.items():
        transpose = is_linear(name)
        expected = shapes[name][::-1] if transpose else shapes[name]
        check_shape(gguf_name, file.tensors[gguf_name].shape, expected, source=str(path))
        values = file.read(gguf_name)
        if permuted:
            values = _rows_in_halves(values, _num_rotated_heads(name, config))
        parameters[name] = to_parameter(values, as_dtype, transpose=transpose)
    return GgufModel(config=config, parameters=parameters, metadata=file.metadata)


def read_gguf_config(path: Path) -> ModelConfig:
    """Only the model's configuration.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as of `read_gguf`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"GGUF file {path} does not exist")
    return _opened(path)[1]


def _opened(path: Path) -> tuple[GgufFile, ModelConfig]:
    file = open_gguf(path)
    try:
        return file, _config(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _num_rotated_heads(name: str, config: ModelConfig) -> int:
    """Heads whose rows the format interleaves; 0 for parameters that are not rotated."""
    last = name.rsplit(".", 1)[-1]
    if last in ("q", "q_bias"):
        return config.num_heads
    return config.num_kv_heads if last in ("k", "k_bias") else 0


def _rows_in_halves(values: Array, num_heads: int) -> Array:
    """Per head, rows (0, h, 1, h+1, ...) back to (0, 1, ..., h, h+1, ...), h half the head."""
    if num_heads == 0:
        return values
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture={architecture!r} is not supported; "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(file.metadata, architecture)
    if keys.count("expert_count", default=0, at_least=0):
        raise ValueError("expert_count is set; mixtures of experts are not supported")
    if "token_embd.weight" not in file.tensors:
        raise ValueError("token_embd.weight is missing")
    num_heads = keys.count("attention.head_count")
    hidden_size = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", default=hidden_size // num_heads)
    num_layers = keys.count("block_count", at_most=_MAX_LAYERS)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.count(key, default=head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key} must equal the head size {head_dim}")
    return ModelConfig(
        vocab_size=keys.count("vocab_size", default=file.tensors["token_embd.weight"].shape[0]),
        hidden_size=hidden_size,
        mlp_size=keys.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.count("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        max_position=keys.count("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        layer_windows=(_window(keys),) * num_layers,
        bos_token_id=_token_id(file.metadata, "bos_token_id"),
        eos_token_ids=_eos(file.metadata),
    )


def _window(keys: "_Keys") -> int | None:
    """One window for all layers; 0 or absent means full attention."""
    if keys.get("attention.sliding_window_pattern") is not None:
        raise ValueError("attention.sliding_window_pattern is not supported")
    return keys.count("attention.sliding_window", default=0, at_least=0) or None


def _rope(file: GgufFile, keys: "_Keys", head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", default=10_000.0)
    old_factor = keys.number("rope.scale_linear", default=1.0)
    kind = keys.get("rope.scaling.type")
    if kind is None:
        kind = "none" if old_factor == 1.0 else "linear"
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type={kind!r} is not supported; use none or linear")
    if ROPE_FREQS in file.tensors:
        if kind == "linear":
            raise ValueError(f"{ROPE_FREQS} and linear rope scaling cannot both apply")
        check_shape(
            ROPE_FREQS, file.tensors[ROPE_FREQS].shape, (head_dim // 2,), source=str(file.path)
        )
        original = keys.count("rope.scaling.original_context_length", default=8192)
        return _rope_of_divisors(file.read(ROPE_FREQS), theta, head_dim, original)
    if kind == "linear":
        default = None if old_factor == 1.0 else old_factor
        return RopeConfig(
            theta=theta, type="linear", factor=keys.number("rope.scaling.factor", default=default)
        )
    return RopeConfig(theta=theta)


def _rope_of_divisors(divisors: Array, theta: float, head_dim: int, original: int) -> RopeConfig:
    """The llama3 scaling that divides the frequencies by exactly these numbers.

    GGUF stores the result, not the settings. Scaling low_freq_factor, high_freq_factor and the
    original length together changes nothing, so low 1 and high 4, which every Llama release
    uses, are tried with the stated length and with powers of two; a candidate must reproduce
    the whole table.
    """
    factor = float(divisors.max())
    if np.array_equal(divisors, np.ones_like(divisors)):
        return RopeConfig(theta=theta)
    for length in (original, *(2**i for i in range(4, 21))):
        rope = RopeConfig(
            theta=theta,
            type="llama3",
            factor=max(factor, 1.0),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=length,
        )
        if np.allclose(_divisors(rope, head_dim), divisors, rtol=1e-5, atol=0):
            return rope
    raise ValueError(
        f"{ROPE_FREQS} is no llama3 scaling with factor {factor:g} and bands 1 and 4; "
        "use the safetensors model, whose config.json states the scaling"
    )


def _divisors(rope: RopeConfig, head_dim: int) -> Array:
    """What llama3 scaling divides each of the head_dim / 2 frequencies by.

    Source: the rotary scaling published with Llama 3.1.
    """
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope.original_max_position * frequencies / (2 * np.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return np.asarray(1.0 / (keep + (1.0 - keep) / rope.factor))


def _eos(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message, each once."""
    found = (_token_id(metadata, key) for key in _EOS_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _token_id(metadata: dict[str, Any], key: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"tokenizer.ggml.{key} must be an integer, got {value!r}")
    return value


class _Keys:
    """Typed reading of the keys under one architecture's name."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(
        self, key: str, *, default: int | None = None, at_least: int = 1, at_most: int = 2**31 - 1
    ) -> int:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.architecture}.{key} must be one integer, got {value!r}")
        if not at_least <= value <= at_most:
            raise ValueError(
                f"{self.architecture}.{key}={value} must be from {at_least} to {at_most}"
            )
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.architecture}.{key} must be one number, got {value!r}")
        return float(value)
