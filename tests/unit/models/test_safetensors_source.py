"""Reading safetensors directories: values, number types, and every hostile or damaged input."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from model_files import LLAMA_JSON, hf_tensors, shard, write_hf, write_index
from safetensors.numpy import save_file

import paxserve.models.safetensors_source as source
from paxserve.models.hf_config import config_from_json
from paxserve.models.random_parameters import random_parameters
from paxserve.models.safetensors_source import read_safetensors

CONFIG = config_from_json(LLAMA_JSON)
TIED = replace(CONFIG, tie_embeddings=True)
PARAMS = random_parameters(CONFIG)
TENSORS = hf_tensors(CONFIG, PARAMS)


@pytest.fixture
def directory(tmp_path):
    return write_hf(tmp_path / "model", LLAMA_JSON, TENSORS)


@pytest.fixture
def opened(monkeypatch):
    """Records which files are opened as safetensors."""
    paths = []
    real = source.safe_open

    def spy(path, framework):
        paths.append(Path(path))
        return real(path, framework=framework)

    monkeypatch.setattr(source, "safe_open", spy)
    return paths


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def test_single_file_round_trip_in_parameter_order(directory):
    found = read_safetensors(directory, CONFIG)
    assert_same(found, PARAMS)
    assert all(a.flags.c_contiguous and a.flags.owndata for a in found.values())


def test_linear_weights_are_transposed_and_the_embedding_is_not(directory):
    found = read_safetensors(directory, CONFIG)
    stored = TENSORS["model.layers.1.mlp.down_proj.weight"]
    assert stored.shape == (32, 96)
    np.testing.assert_array_equal(found["layers.1.down"], stored.T)
    np.testing.assert_array_equal(found["embed"], TENSORS["model.embed_tokens.weight"])


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_shards_round_trip(directory, num_shards):
    shard(directory, TENSORS, num_shards)
    assert_same(read_safetensors(directory, CONFIG), PARAMS)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_number_types(tmp_path, stored, wanted):
    tensors = {name: values.astype(stored) for name, values in TENSORS.items()}
    found = read_safetensors(write_hf(tmp_path / "m", LLAMA_JSON, tensors), CONFIG, dtype=wanted)
    as_type = np.float32 if wanted == "float32" else ml_dtypes.bfloat16
    assert_same(found, {name: v.astype(stored).astype(as_type) for name, v in PARAMS.items()})


@pytest.mark.parametrize(
    "name", ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"]
)
def test_rotary_buffers_are_skipped(tmp_path, name):
    tensors = TENSORS | {name: np.ones(4, np.float32)}
    assert_same(read_safetensors(write_hf(tmp_path / "m", LLAMA_JSON, tensors), CONFIG), PARAMS)


def test_a_tied_head_may_be_stored_only_as_a_copy(tmp_path):
    expected = {name: values for name, values in PARAMS.items() if name != "lm_head"}
    copy = TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"]}
    assert_same(read_safetensors(write_hf(tmp_path / "a", LLAMA_JSON, copy), TIED), expected)
    with pytest.raises(ValueError, match=r"lm_head\.weight that differs.*tie_word_embeddings"):
        read_safetensors(write_hf(tmp_path / "b", LLAMA_JSON, TENSORS), TIED)


def test_missing_and_unexpected_tensors_are_named_together(tmp_path):
    tensors = {k: v for k, v in TENSORS.items() if k != "model.layers.1.mlp.up_proj.weight"}
    tensors["model.layers.2.input_layernorm.weight"] = np.ones(32, np.float32)
    with pytest.raises(
        ValueError,
        match=r"1 missing \[model\.layers\.1\.mlp\.up_proj\.weight\], "
        r"1 unexpected \[model\.layers\.2\.input_layernorm\.weight\]",
    ):
        read_safetensors(write_hf(tmp_path / "m", LLAMA_JSON, tensors), CONFIG)


def test_untied_model_without_head_is_refused(tmp_path):
    tensors = {k: v for k, v in TENSORS.items() if k != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"missing \[lm_head\.weight\]"):
        read_safetensors(write_hf(tmp_path / "m", LLAMA_JSON, tensors), CONFIG)


def test_a_wrong_shape_gives_both_shapes(tmp_path):
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = TENSORS | {name: np.zeros((32, 32), np.float32)}
    with pytest.raises(ValueError, match=r"k_proj.*\(32, 32\).*\(16, 32\)"):
        read_safetensors(write_hf(tmp_path / "m", LLAMA_JSON, tensors), CONFIG)


def test_integer_weights_are_refused(tmp_path):
    tensors = TENSORS | {"model.norm.weight": np.ones(32, np.int8)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*stored as I8"):
        read_safetensors(write_hf(tmp_path / "m", LLAMA_JSON, tensors), CONFIG)


def test_an_unknown_dtype_is_refused_before_reading(directory, opened):
    with pytest.raises(ValueError, match="dtype='float16'"):
        read_safetensors(directory, CONFIG, dtype="float16")
    assert opened == []


@pytest.mark.parametrize("keep", [0, 4, 9, 100, -1, -1000])
def test_a_truncated_file_is_named(directory, keep):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        read_safetensors(directory, CONFIG)


@pytest.mark.parametrize("position", [0, 3, 7, 8, 12])
def test_a_corrupted_header_is_named(directory, position):
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[position] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_safetensors(directory, CONFIG)


def test_a_truncated_shard_is_named(directory):
    shard(directory, TENSORS)
    file = directory / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        read_safetensors(directory, CONFIG)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "sub/inside.safetensors",
        "/tmp/outside.safetensors",
        "..\\outside.safetensors",
        "C:\\outside.safetensors",
        "C:outside.safetensors",
        "model.safetensors\0.txt",
        "..",
        ".",
        "",
    ],
)
def test_shard_names_that_leave_the_directory_open_nothing(directory, opened, name):
    save_file(TENSORS, directory.parent / "outside.safetensors")
    (directory / "sub").mkdir()
    save_file(TENSORS, directory / "sub" / "inside.safetensors")
    (directory / "model.safetensors").unlink()
    write_index(directory, dict.fromkeys(TENSORS, name))
    with pytest.raises(ValueError, match="must be a plain name"):
        read_safetensors(directory, CONFIG)
    assert opened == []


def test_a_shard_that_is_no_safetensors_name_is_refused(directory, opened):
    (directory / "model.safetensors").rename(directory / "weights.bin")
    write_index(directory, dict.fromkeys(TENSORS, "weights.bin"))
    with pytest.raises(ValueError, match=r"'weights\.bin'; shards must be \.safetensors"):
        read_safetensors(directory, CONFIG)
    assert opened == []


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": ["x"]}, "x"])
def test_a_malformed_index_is_refused(directory, weight_map):
    (directory / "model.safetensors").unlink()
    write_index(directory, weight_map)
    with pytest.raises(ValueError, match=r"index\.json must map"):
        read_safetensors(directory, CONFIG)


def test_a_missing_shard_is_named(directory):
    shard(directory, TENSORS)
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors is missing"):
        read_safetensors(directory, CONFIG)


def test_index_and_shards_must_agree(directory):
    weight_map = shard(directory, TENSORS)
    moved = weight_map | {"lm_head.weight": "model-00002-of-00002.safetensors"}
    assert moved != weight_map
    write_index(directory, moved)
    with pytest.raises(ValueError, match=r"model-0000[12]-of-00002.*lm_head\.weight"):
        read_safetensors(directory, CONFIG)


def test_a_tensor_that_no_index_entry_names_is_unexpected(directory):
    weight_map = shard(directory, TENSORS | {"stray.weight": np.ones(2, np.float32)})
    del weight_map["stray.weight"]
    write_index(directory, weight_map)
    with pytest.raises(ValueError, match=r"0 missing \[\], 1 unexpected \[stray\.weight\]"):
        read_safetensors(directory, CONFIG)


@pytest.mark.parametrize("single", [True, False])
def test_a_link_that_leaves_the_directory_opens_nothing(directory, opened, single):
    outside = directory.parent / "outside.safetensors"
    (directory / "model.safetensors").rename(outside)
    name = "model.safetensors" if single else "model-1.safetensors"
    (directory / name).symlink_to(outside)
    if not single:
        write_index(directory, dict.fromkeys(TENSORS, name))
    with pytest.raises(ValueError, match="outside the model directory"):
        read_safetensors(directory, CONFIG)
    assert opened == []


def test_a_link_inside_the_directory_is_followed(directory):
    (directory / "model.safetensors").rename(directory / "real.safetensors")
    (directory / "model.safetensors").symlink_to("real.safetensors")
    assert_same(read_safetensors(directory, CONFIG), PARAMS)


def hf_cache(root: Path, blobs: Path) -> Path:
    """A snapshot as huggingface_hub lays it out, its file linked into `blobs`."""
    snapshot = root / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS, blobs / "d34db33f")
    (snapshot / "model.safetensors").symlink_to(blobs / "d34db33f")
    return snapshot


def test_a_cache_snapshot_may_link_into_its_own_blobs(tmp_path):
    snapshot = hf_cache(tmp_path, tmp_path / "models--org--name" / "blobs")
    assert_same(read_safetensors(snapshot, CONFIG), PARAMS)


def test_a_cache_snapshot_may_not_link_into_the_blobs_of_another(tmp_path, opened):
    snapshot = hf_cache(tmp_path, tmp_path / "models--org--other" / "blobs")
    with pytest.raises(ValueError, match="outside the model directory"):
        read_safetensors(snapshot, CONFIG)
    assert opened == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.pt", "m.pth", "m.ckpt", "m.PKL"])
def test_a_directory_of_pickles_is_refused_unopened(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"\x80\x04")
    monkeypatch.setattr("pickle.Unpickler", None)
    with pytest.raises(ValueError, match=rf"{name}.*refused.*safe_serialization=True"):
        read_safetensors(tmp_path, CONFIG)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        read_safetensors(tmp_path, CONFIG)


def test_pickles_beside_safetensors_do_no_harm(directory):
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert_same(read_safetensors(directory, CONFIG), PARAMS)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_biases_round_trip(tmp_path, family):
    name = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[family]
    config_json = LLAMA_JSON | {"model_type": family, "architectures": [name]}
    config_json |= {"attention_bias": True, "mlp_bias": True}
    config = config_from_json(config_json)
    params = random_parameters(config, seed=3)
    tensors = hf_tensors(config, params)
    assert ("model.layers.0.self_attn.q_proj.bias" in tensors) is True
    assert ("model.layers.0.self_attn.o_proj.bias" in tensors) is (family == "llama")
    assert_same(read_safetensors(write_hf(tmp_path / "m", config_json, tensors), config), params)
