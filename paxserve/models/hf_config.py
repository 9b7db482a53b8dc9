"""Hugging Face `config.json` to `ModelConfig`.

Owns: which model types are understood, their defaults, and the two spellings of rotary scaling.
In: `config.json` and, if there, `generation_config.json`. Out: a `ModelConfig`. Must not know:
weights, tokenizers. Keys that name code (`auto_map`, `trust_remote_code`) are never looked at.

Source: the defaults are those of transformers' LlamaConfig, MistralConfig and Qwen2Config.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paxserve.models.config import ModelConfig, RopeConfig
from paxserve.models.model_directory import has_file, read_json

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
# What transformers takes when the key is absent (an explicit null means num_attention_heads).
_KV_HEADS_WHEN_ABSENT = {"mistral": 8, "qwen2": 32}
_MAX_POSITION_WHEN_ABSENT = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768}
_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_MAX_COUNT = 2**31 - 1
_MAX_LAYERS = 4096


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration of a model directory.

    Raises:
        ValueError: a file is missing or not understood; the message names the key and value.
    """
    config = read_json(directory, "config.json")
    generation: dict[str, Any] = {}
    if has_file(directory, "generation_config.json"):
        generation = read_json(directory, "generation_config.json")
    try:
        return config_from_json(config, generation)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error


def read_dtype(directory: Path) -> str | None:
    """The number type of the published weights, under its new or its old key; None if a directory
    has no `config.json`, or that names none.
    """
    if not has_file(directory, "config.json"):
        return None
    config = read_json(directory, "config.json")
    found: str | None = config.get("dtype") or config.get("torch_dtype")
    return found


def config_from_json(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Translate the two JSON objects.

    The end tokens are the union of both files' `eos_token_id`, generation first: chat models of
    the Llama 3 family end a turn with a token that only `generation_config.json` lists.

    Args:
        config: contents of `config.json`.
        generation: contents of `generation_config.json`.

    Raises:
        ValueError: an unsupported architecture, activation, rotary type or value.
    """
    family = _family(config)
    _check_supported(config)
    num_heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    num_layers = _count(config, "num_hidden_layers", at_most=_MAX_LAYERS)
    bias = _flag(config, "attention_bias") if family == "llama" else False
    return ModelConfig(
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        mlp_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, family, num_heads),
        head_dim=_head_dim(config, hidden_size, num_heads),
        max_position=_count(
            config, "max_position_embeddings", default=_MAX_POSITION_WHEN_ABSENT[family]
        ),
        rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope=_rope(config),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=_flag(config, "mlp_bias") if family == "llama" else False,
        layer_windows=_layer_windows(config, family, num_layers),
        bos_token_id=_bos(config),
        eos_token_ids=_eos(generation or {}, config),
    )


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise ValueError(
            f"model_type={family!r} is not supported; use one of {', '.join(_ARCHITECTURES)}"
        )
    architectures = config.get("architectures") or [_ARCHITECTURES[family]]
    if architectures != [_ARCHITECTURES[family]]:
        raise ValueError(
            f"architectures={architectures!r} is not supported for model_type={family!r}; "
            f"it must be [{_ARCHITECTURES[family]!r}]"
        )
    return family


def _check_supported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act={activation!r} is not supported; it must be 'silu'")
    if config.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; use the unquantised weights or a GGUF file")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor={config['partial_rotary_factor']!r} is not supported; "
            "the whole head must be rotated (1.0)"
        )


def _num_kv_heads(config: Mapping[str, Any], family: str, num_heads: int) -> int:
    if "num_key_value_heads" not in config:
        return _KV_HEADS_WHEN_ABSENT.get(family, num_heads)
    return _count(config, "num_key_value_heads", default=num_heads)


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _count(config, "head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}; "
            "set head_dim"
        )
    return hidden_size // num_heads


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Rotary settings from `rope_parameters` (new) or `rope_scaling` and `rope_theta` (old)."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(key) or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise ValueError(f"{key}={scaling!r} must be one flat object for all layers")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{key} sets partial_rotary_factor; only 1.0 is supported")
    kind = _rope_type(scaling, key)
    missing = [name for name in _SCALING_KEYS[kind] if scaling.get(name) is None]
    if missing:
        raise ValueError(f"rope_type={kind!r} in {key} needs {', '.join(missing)}")
    where = scaling if scaling.get("rope_theta") is not None else config
    theta = _number(where, "rope_theta", default=10_000.0)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=_number(scaling, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=_number(scaling, "factor"),
            low_freq_factor=_number(scaling, "low_freq_factor"),
            high_freq_factor=_number(scaling, "high_freq_factor"),
            original_max_position=_count(scaling, "original_max_position_embeddings"),
        )
    return RopeConfig(theta=theta)


def _rope_type(scaling: Mapping[str, Any], key: str) -> str:
    named = [scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None]
    if not named and "factor" in scaling:
        raise ValueError(f"{key} has a factor but no rope_type; say which scaling is meant")
    kind = named[0] if named else "default"
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        raise ValueError(f"rope_type={kind!r} is not supported; use one of {list(_SCALING_KEYS)}")
    if named and named[-1] != kind:
        raise ValueError(f"{key} names two types, {named}; keep rope_type only")
    return kind


def _layer_windows(
    config: Mapping[str, Any], family: str, num_layers: int
) -> tuple[int | None, ...]:
    """Sliding window per layer: Mistral every layer, Qwen2 the later layers if switched on."""
    if family == "llama":
        return (None,) * num_layers
    window = config.get("sliding_window", 4096)  # an explicit null means none
    if window is None or (family == "qwen2" and not _flag(config, "use_sliding_window")):
        return (None,) * num_layers
    size = _count({"sliding_window": window}, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None and family == "mistral":
        return (size,) * num_layers
    if kinds is None:
        first = _count(config, "max_window_layers", default=28, at_least=0)
        return tuple(size if i >= first else None for i in range(num_layers))
    return _windows_of_types(kinds, num_layers, size)


def _windows_of_types(kinds: object, num_layers: int, size: int) -> tuple[int | None, ...]:
    known = {"full_attention": None, "sliding_attention": size}
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(isinstance(kind, str) and kind in known for kind in kinds)
    ):
        raise ValueError(
            f"layer_types={kinds!r} must list {num_layers} of {', '.join(known)}, one a layer"
        )
    return tuple(known[kind] for kind in kinds)


def _bos(config: Mapping[str, Any]) -> int | None:
    if config.get("bos_token_id") is None:
        return None
    return _count(config, "bos_token_id", at_least=0)


def _eos(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Union of the sources' end tokens, in order, each an int, a list of ints or null."""
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            found[_count({"eos_token_id": token_id}, "eos_token_id", at_least=0)] = None
    return tuple(found)


def _count(
    source: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    at_least: int = 1,
    at_most: int = _MAX_COUNT,
) -> int:
    value = source.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise ValueError(f"{key} must be an integer from {at_least} to {at_most}, got {value!r}")
    return value


def _number(source: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = source.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    if not abs(value) < 2**63:
        raise ValueError(f"{key} must be finite and below 2**63, got {value!r}")
    return float(value)


def _flag(source: Mapping[str, Any], key: str) -> bool:
    value = source.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value
