"""config.json of three families: values, defaults, and everything that must be refused."""

import json
import sys

import pytest
from model_files import LLAMA_JSON

from paxserve.models.config import ModelConfig, RopeConfig
from paxserve.models.hf_config import config_from_json, read_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(theta=500_000.0, type="llama3", factor=32.0)


def family(model_type: str, **changes: object) -> dict:
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[model_type]
    base = LLAMA_JSON | {"model_type": model_type, "architectures": [f"{name}ForCausalLM"]}
    merged = base | changes
    return {key: value for key, value in merged.items() if value != "absent"}


def test_every_dimension_is_read():
    assert config_from_json(LLAMA_JSON) == ModelConfig(
        vocab_size=48,
        hidden_size=32,
        mlp_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=128,
        rms_norm_eps=1e-5,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("source", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 500_000, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, LLAMA3_ROPE),
        ({"rope_theta": 5e5, "rope_parameters": LLAMA3}, LLAMA3_ROPE),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, LLAMA3_ROPE),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            RopeConfig(theta=5e5),
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
            RopeConfig(),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}},
            RopeConfig(type="linear", factor=4.0),
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4}},
            RopeConfig(type="linear", factor=4.0),
        ),
    ],
)
def test_rotary_settings_in_both_spellings(source, rope):
    assert config_from_json(LLAMA_JSON | source).rope == rope


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type='yarn'"),
        ({"type": "dynamic", "factor": 2.0}, "rope_type='dynamic'"),
        ({"rope_type": ["linear"]}, "not supported"),
        ({"rope_type": "linear", "type": "default", "factor": 2.0}, "names two types"),
        ({"factor": 2.0}, "no rope_type"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor must be a number"),
        ({"rope_type": "linear", "factor": 0.0}, "factor >= 1"),
        ({"full_attention": {"rope_type": "default"}}, "flat object"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA3 | {"original_max_position_embeddings": 8192.5}, "integer"),
        *[
            ({k: v for k, v in LLAMA3.items() if k != key}, f"needs {key}")
            for key in LLAMA3
            if key != "rope_type"
        ],
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_unknown_or_incomplete_rotary_settings_are_refused(key, rope, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(LLAMA_JSON | {key: rope})


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (family("llama", num_key_value_heads="absent"), "num_kv_heads", 4),
        (family("llama", num_key_value_heads=None), "num_kv_heads", 4),
        (
            family("mistral", num_key_value_heads="absent", num_attention_heads=16),
            "num_kv_heads",
            8,
        ),
        (family("mistral", num_key_value_heads=None), "num_kv_heads", 4),
        (family("llama", head_dim=64), "head_dim", 64),
        (family("llama", head_dim=None), "head_dim", 8),
        (family("llama", rms_norm_eps="absent"), "rms_norm_eps", 1e-6),
        (family("llama", max_position_embeddings="absent"), "max_position", 2048),
        (family("qwen2", max_position_embeddings="absent"), "max_position", 32768),
        (family("llama"), "tie_embeddings", False),
        (family("qwen2"), "tie_embeddings", False),
        (family("qwen2", tie_word_embeddings=True), "tie_embeddings", True),
        (family("llama", bos_token_id=1), "bos_token_id", 1),
        (family("llama"), "bos_token_id", None),
        (family("llama", architectures=None), "num_layers", 2),
    ],
)
def test_defaults_per_family(config, field, value):
    assert getattr(config_from_json(config), field) == value


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        (family("llama"), (False, False, False)),
        (family("llama", attention_bias=True), (True, True, False)),
        (family("llama", mlp_bias=True), (False, False, True)),
        (family("qwen2"), (True, False, False)),
        (family("qwen2", attention_bias=False), (True, False, False)),
        (family("mistral", attention_bias=True), (False, False, False)),
    ],
)
def test_biases(config, biases):
    read = config_from_json(config)
    assert (read.qkv_bias, read.output_bias, read.mlp_bias) == biases


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (family("llama", sliding_window=16), (None, None)),
        (family("mistral", sliding_window=16), (16, 16)),
        (family("mistral", sliding_window=None), (None, None)),
        (family("mistral"), (4096, 4096)),
        (family("qwen2", sliding_window=16), (None, None)),
        (family("qwen2", sliding_window=16, use_sliding_window=True), (None, None)),
        (
            family("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1),
            (None, 16),
        ),
        (
            family("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=0),
            (16, 16),
        ),
        (
            family(
                "qwen2",
                sliding_window=16,
                use_sliding_window=True,
                max_window_layers=0,
                layer_types=["sliding_attention", "full_attention"],
            ),
            (16, None),
        ),
    ],
)
def test_sliding_windows(config, windows):
    assert config_from_json(config).layer_windows == windows


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (None, None, ()),
        (5, [7, 8, 5], (7, 8, 5)),
        ([5, 6], 7, (7, 5, 6)),
        (None, [7, 7], (7,)),
    ],
)
def test_end_tokens_are_the_union_of_both_files(config, generation, ids):
    generation_json = {} if generation is None else {"eos_token_id": generation}
    read = config_from_json(LLAMA_JSON | {"eos_token_id": config}, generation_json)
    assert read.eos_token_ids == ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type='gemma'"),
        ({"model_type": None}, "model_type=None"),
        ({"model_type": ["llama"]}, "not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 32.0}, "hidden_size must be an integer"),
        ({"hidden_size": 33}, "set head_dim"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be an integer from 1 to 4096"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rope_theta": 10**400}, "finite"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer"),
        ({"eos_token_id": [1, [2]]}, "eos_token_id must be an integer"),
        ({"eos_token_id": 48}, "token id 48"),
        ({"bos_token_id": [1]}, "bos_token_id must be an integer"),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": True}
            | {"layer_types": ["full_attention"]},
            "must list 2",
        ),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": True}
            | {"layer_types": ["full_attention", []]},
            "must list 2",
        ),
        ({"model_type": "mistral", "architectures": None, "sliding_window": -4}, "sliding_window"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(LLAMA_JSON | change)


def test_code_named_by_a_config_is_neither_imported_nor_needed(tmp_path, monkeypatch):
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('imported')")
    code = {"auto_map": {"AutoConfig": "modeling_evil.Config"}, "trust_remote_code": True}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_JSON | code))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    assert read_config(tmp_path) == config_from_json(LLAMA_JSON)
    assert "modeling_evil" not in set(sys.modules) - before


def test_read_config_unions_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_JSON))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert read_config(tmp_path).eos_token_ids == (7, 2, 9)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b'{"a": ' + b"[" * 100_000, b"\xff\xfe{}"],
    ids=["empty", "open", "list", "null", "deep", "not-utf8"],
)
def test_a_broken_config_file_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_config_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        read_config(tmp_path)
