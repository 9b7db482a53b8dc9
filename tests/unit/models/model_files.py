"""Small model files that the tests write themselves."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from paxserve.models.config import ModelConfig
from paxserve.models.parameter_names import gguf_names, hf_names, is_linear

LLAMA_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def hf_tensors(config: ModelConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters as Hugging Face stores them."""
    return {
        hf: np.ascontiguousarray(params[name].T if is_linear(name) else params[name])
        for hf, name in hf_names(config).items()
    }


def write_hf(directory: Path, config_json: dict, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json))
    save_file(tensors, directory / "model.safetensors")
    return directory


def shard(directory: Path, tensors: dict[str, np.ndarray], num_shards: int = 2) -> dict[str, str]:
    """Replace the single file by shards; returns the weight map."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[i::num_shards]
        save_file({name: tensors[name] for name in mine}, directory / file)
        weight_map |= dict.fromkeys(mine, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter, written with indices and not with reshapes."""
    half = len(rows) // num_heads // 2
    order = [
        head * 2 * half + part * half + i
        for head in range(num_heads)
        for i in range(half)
        for part in range(2)
    ]
    return rows[order]


def write_gguf(
    path: Path,
    config: ModelConfig,
    params: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    extra: dict[str, object] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A GGUF file in the converter's layout; `extra` overrides metadata, None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(config, architecture) | (extra or {})).items():
        _add(writer, key, value)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    stored = {}
    for gguf_name, name in gguf_names(config).items():
        values = params[name].T if is_linear(name) else params[name]
        last = name.rsplit(".", 1)[-1].removesuffix("_bias")
        if architecture == "llama" and last in heads:
            values = interleaved(values, heads[last])
        stored[gguf_name] = np.ascontiguousarray(values)
    for name, values in (stored | (tensors or {})).items():
        if name in without:
            continue
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            quantised = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, quantised, raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: ModelConfig, architecture: str) -> dict[str, object]:
    return {
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.context_length": config.max_position,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.mlp_size,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope.theta,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


CORPUS = [
    "The cat sat on the mat. Numbers 123 and 2024!",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600",
] * 20


def byte_level_backend(vocab_size: int = 320) -> Tokenizer:
    """A trained byte-level BPE with two control tokens at the end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("\u2603word", special=False, normalized=False)])
    return backend


def sentencepiece_backend() -> Tokenizer:
    """A Llama 2 style BPE: space marks, and a token for every byte."""
    words = [
        "\u2581",
        "t",
        "h",
        "e",
        "c",
        "a",
        "\u2581t",
        "\u2581th",
        "\u2581the",
        "\u4f60",
        "\u00e9",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend
