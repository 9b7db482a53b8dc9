"""GGUF models: row order, rotary scaling, options, and what is refused."""

from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from model_files import LLAMA_JSON, interleaved, write_gguf
from numpy_llama import inverse_frequencies, logits

from paxserve.models.config import RopeConfig
from paxserve.models.gguf_source import read_gguf
from paxserve.models.hf_config import config_from_json
from paxserve.models.random_parameters import random_parameters

CONFIG = config_from_json(LLAMA_JSON)  # 4 query heads, 2 kv heads
PARAMS = random_parameters(CONFIG)
QWEN2 = replace(CONFIG, qkv_bias=True)


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def test_the_test_writes_the_converters_row_order():
    rows = np.arange(8.0)[:, None]
    # llama.cpp's converter: reshape (heads, 2, half, ...), swap the middle axes, flatten.
    converter = rows.reshape(2, 2, 2, 1).swapaxes(1, 2).reshape(8, 1)
    np.testing.assert_array_equal(interleaved(rows, 2), converter)
    assert converter[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama_round_trip_restores_row_order(tmp_path):
    model = read_gguf(write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS))
    assert replace(model.config, rms_norm_eps=1e-5) == CONFIG
    assert_same(model.parameters, PARAMS)


def test_qwen2_rows_and_biases_stay_as_they_are(tmp_path):
    params = random_parameters(QWEN2)
    model = read_gguf(write_gguf(tmp_path / "a.gguf", QWEN2, params, architecture="qwen2"))
    assert replace(model.config, rms_norm_eps=1e-5) == QWEN2
    assert_same(model.parameters, params)


def test_llama_biases_are_reordered_like_their_weights(tmp_path):
    config = replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True)
    params = random_parameters(config)
    model = read_gguf(write_gguf(tmp_path / "a.gguf", config, params))
    assert replace(model.config, rms_norm_eps=1e-5) == config
    assert_same(model.parameters, params)


def test_reading_qwen2_rows_as_llama_would_be_wrong(tmp_path):
    """The two architectures differ, so the tests above can tell them apart."""
    model = read_gguf(
        write_gguf(
            tmp_path / "a.gguf",
            CONFIG,
            PARAMS,
            tensors={"blk.0.attn_k.weight": np.ascontiguousarray(PARAMS["layers.0.k"].T)},
        )
    )
    assert not np.array_equal(model.parameters["layers.0.k"], PARAMS["layers.0.k"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_tensors_become_floats_near_the_originals(tmp_path, dtype):
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, kind=gguf.GGMLQuantizationType.Q8_0)
    model = read_gguf(path, dtype=dtype)
    as_type = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    for name, values in PARAMS.items():
        assert model.parameters[name].dtype == as_type
        assert model.parameters[name].flags.c_contiguous
        np.testing.assert_allclose(
            model.parameters[name].astype(np.float32), values, atol=0.01 * abs(values).max()
        )
    ids = [1, 5, 9, 30, 7]
    if dtype == "float32":
        close = logits(CONFIG, model.parameters, ids) - logits(CONFIG, PARAMS, ids)
        assert abs(close).max() < 0.1


def test_a_missing_output_tensor_means_tied(tmp_path):
    tied = replace(CONFIG, tie_embeddings=True)
    model = read_gguf(write_gguf(tmp_path / "a.gguf", tied, random_parameters(tied)))
    assert model.config.tie_embeddings is True
    assert "lm_head" not in model.parameters


def write_rope_freqs(tmp_path, rope: RopeConfig, **extra):
    """The tensor as the converter derives it: plain over scaled frequencies."""
    plain = inverse_frequencies(RopeConfig(theta=rope.theta), CONFIG.head_dim)
    divisors = (plain / inverse_frequencies(rope, CONFIG.head_dim)).astype(np.float32)
    config = replace(CONFIG, rope=RopeConfig(theta=rope.theta))
    tensors = {"rope_freqs.weight": divisors}
    return write_gguf(tmp_path / "a.gguf", config, PARAMS, tensors=tensors, extra=extra)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5, type="llama3", factor=8.0, original_max_position=8192),
        RopeConfig(theta=5e5, type="llama3", factor=32.0, original_max_position=8192),
        RopeConfig(theta=5e5, type="llama3", factor=8.0, original_max_position=16),
    ],
)
def test_llama3_scaling_is_recovered_exactly(tmp_path, rope):
    found = read_gguf(write_rope_freqs(tmp_path, rope)).config.rope
    assert found.type == "llama3"
    np.testing.assert_allclose(
        inverse_frequencies(found, CONFIG.head_dim),
        inverse_frequencies(rope, CONFIG.head_dim),
        rtol=1e-5,
    )


def test_llama3_scaling_with_a_stated_odd_length_is_recovered(tmp_path):
    rope = RopeConfig(theta=1e3, type="llama3", factor=4.0, original_max_position=100)
    path = write_rope_freqs(tmp_path, rope, **{"llama.rope.scaling.original_context_length": 100})
    found = read_gguf(path).config.rope
    np.testing.assert_allclose(
        inverse_frequencies(found, CONFIG.head_dim),
        inverse_frequencies(rope, CONFIG.head_dim),
        rtol=1e-5,
    )


def test_rope_freqs_of_ones_mean_no_scaling(tmp_path):
    path = write_rope_freqs(tmp_path, RopeConfig(theta=5e5))
    assert read_gguf(path).config.rope == RopeConfig(theta=5e5)


def test_rope_freqs_that_are_no_llama3_scaling_are_refused(tmp_path):
    tensors = {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, tensors=tensors)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is no llama3 scaling"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("extra", "rope"),
    [
        ({"llama.rope.freq_base": 5e5}, RopeConfig(theta=5e5)),
        ({"llama.rope.freq_base": None}, RopeConfig()),
        ({"llama.rope.scaling.type": "none"}, RopeConfig()),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeConfig(type="linear", factor=4.0),
        ),
        ({"llama.rope.scale_linear": 2.0}, RopeConfig(type="linear", factor=2.0)),
    ],
)
def test_rotary_metadata(tmp_path, extra, rope):
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, extra=extra)
    assert read_gguf(path).config.rope == rope


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"llama.attention.sliding_window": 16}, "layer_windows", (16, 16)),
        ({"llama.attention.sliding_window": 0}, "layer_windows", (None, None)),
        ({"llama.attention.key_length": None}, "head_dim", 8),
        ({"tokenizer.ggml.bos_token_id": 1}, "bos_token_id", 1),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_ids", ()),
        (
            {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2},
            "eos_token_ids",
            (2, 7),
        ),
        ({"llama.vocab_size": 48}, "vocab_size", 48),
        ({"llama.expert_count": 0}, "num_layers", 2),
    ],
)
def test_other_metadata(tmp_path, extra, field, value):
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, extra=extra)
    assert getattr(read_gguf(path).config, field) == value


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn'"),
        ({"llama.rope.scaling.type": "linear"}, r"rope\.scaling\.factor must be one number"),
        ({"llama.rope.freq_base": "x"}, r"rope\.freq_base must be one number"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count must equal the head size 8"),
        ({"llama.attention.value_length": 4}, r"value_length must equal the head size 8"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv must be one integer"),
        ({"llama.attention.head_count": None}, r"head_count must be one integer, got None"),
        ({"llama.block_count": 5000}, r"block_count=5000"),
        ({"llama.block_count": 3}, r"missing \[blk\.2\.attn_k\.weight"),
        ({"llama.block_count": 1}, r"unexpected \[blk\.1\.attn_k\.weight"),
        ({"llama.feed_forward_length": 95}, r"ffn_gate.*\(96, 32\).*\(95, 32\)"),
        ({"llama.vocab_size": 50}, r"token_embd.*\(48, 32\).*\(50, 32\)"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.sliding_window_pattern": 6}, "sliding_window_pattern"),
        ({"tokenizer.ggml.eos_token_id": 48}, "token id 48"),
        ({"tokenizer.ggml.eot_token_id": "x"}, "eot_token_id must be an integer"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon must be one number"),
        ({"llama.context_length": 0}, "context_length=0"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_file(tmp_path, extra, message):
    path = write_gguf(tmp_path / "bad.gguf", CONFIG, PARAMS, extra=extra)
    with pytest.raises(ValueError, match=message) as raised:
        read_gguf(path)
    assert "bad.gguf" in str(raised.value)


def test_linear_scaling_and_rope_freqs_exclude_each_other(tmp_path):
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    tensors = {"rope_freqs.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, extra=extra, tensors=tensors)
    with pytest.raises(ValueError, match="cannot both apply"):
        read_gguf(path)


def test_rope_freqs_of_the_wrong_length_are_refused(tmp_path):
    tensors = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, tensors=tensors)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight.*\(8,\).*\(4,\)"):
        read_gguf(path)


@pytest.mark.parametrize("architecture", ["gemma", "qwen2moe"])
def test_other_architectures_are_refused(tmp_path, architecture):
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, architecture=architecture)
    with pytest.raises(ValueError, match=f"general.architecture='{architecture}'"):
        read_gguf(path)


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf",
        CONFIG,
        PARAMS,
        without=("blk.1.ffn_up.weight",),
        tensors={"blk.0.extra.weight": np.ones(4, np.float32)},
    )
    with pytest.raises(
        ValueError, match=r"missing \[blk\.1\.ffn_up\.weight\].*\[blk\.0\.extra\.weight\]"
    ):
        read_gguf(path)


def test_a_file_without_embedding_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, without=("token_embd.weight",))
    with pytest.raises(ValueError, match=r"token_embd\.weight is missing"):
        read_gguf(path)
