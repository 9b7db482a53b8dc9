"""A Hugging Face model directory's safetensors to our parameters.

Owns: finding the files (one file, or shards behind an index) and reading them. In: a directory
and its `ModelConfig`. Out: numpy arrays by our names. Must not know: jax, tokenizers. Pickle
formats are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from paxserve.models.config import ModelConfig, parameter_shapes
from paxserve.models.model_directory import (
    contained_file,
    has_file,
    pickle_files,
    read_json,
    refuse_pickle,
)
from paxserve.models.parameter_names import hf_names, is_linear
from paxserve.models.parameters import (
    Array,
    check_names,
    check_shape,
    parameter_dtype,
    to_parameter,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_TIED_COPY = "lm_head.weight"


def read_safetensors(
    directory: Path, config: ModelConfig, *, dtype: str = "float32"
) -> dict[str, Array]:
    """Read every parameter of the model, exactly once.

    Known tensors that are no parameters (`*.rotary_emb.inv_freq`) are skipped. A stored
    `lm_head.weight` of a model with tied embeddings must equal the embedding.

    Args:
        directory: holds `model.safetensors`, or the index and its shards.
        config: decides names and shapes.
        dtype: float32 or bfloat16.

    Raises:
        ValueError: a file is missing, outside the directory, damaged or a pickle; a tensor is
            missing, unexpected, stored twice, not floating point, or of the wrong shape.
    """
    as_dtype = parameter_dtype(dtype)
    names, shapes = hf_names(config), parameter_shapes(config)
    tensors = _tensor_files(directory)
    found = {name: path for name, path in tensors.items() if not _is_buffer(name)}
    tied_copy = found.pop(_TIED_COPY, None) if config.tie_embeddings else None
    check_names(found, names, source=str(directory))
    parameters = {}
    for path in dict.fromkeys(found.values()):
        for hf_name in [name for name, where in found.items() if where == path]:
            name = names[hf_name]
            parameters[name] = _read(path, hf_name, name, shapes[name], as_dtype)
    if tied_copy is not None:
        copy = _read(tied_copy, _TIED_COPY, "embed", shapes["embed"], as_dtype)
        if not np.array_equal(copy, parameters["embed"]):
            raise ValueError(
                f"{tied_copy} stores a {_TIED_COPY} that differs from the embedding, but the "
                "configuration ties them; set tie_word_embeddings to false"
            )
    return {name: parameters[name] for name in shapes}


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if has_file(directory, SINGLE):
        path = contained_file(directory, SINGLE)
        return dict.fromkeys(_stored_names(path), path)
    if has_file(directory, INDEX):
        return _sharded_files(directory)
    pickles = pickle_files(directory)
    if pickles:
        raise refuse_pickle(f"{directory} has no safetensors, only {', '.join(pickles)}")
    raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}; nothing else is read")


def _sharded_files(directory: Path) -> dict[str, Path]:
    weight_map = read_json(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / INDEX} must map tensor names to shards in weight_map")
    shards = dict.fromkeys(weight_map.values()) if _all_text(weight_map) else None
    if shards is None:
        raise ValueError(f"{directory / INDEX} must map tensor names to file names, as text")
    paths = {shard: _shard_path(directory, shard) for shard in shards}
    tensors: dict[str, Path] = {}
    for shard, path in paths.items():
        mapped = [name for name, where in weight_map.items() if where == shard]
        check_names(_stored_names(path), mapped, source=str(path))
        tensors |= dict.fromkeys(mapped, path)
    return tensors


def _all_text(weight_map: Mapping[Any, Any]) -> bool:
    return all(isinstance(shard, str) for shard in weight_map.values())


def _shard_path(directory: Path, shard: str) -> Path:
    path = contained_file(directory, shard)
    if path.suffix != ".safetensors":
        raise ValueError(f"{directory / INDEX} names {shard!r}; shards must be .safetensors files")
    return path


def _stored_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _read(
    path: Path, hf_name: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """One tensor in our layout; type and shape are checked before its data is touched."""
    transpose = is_linear(name)
    try:
        with safe_open(path, framework="np") as file:
            stored = file.get_slice(hf_name)
            if stored.get_dtype() not in _FLOAT_TYPES:
                raise ValueError(
                    f"{hf_name} in {path} is stored as {stored.get_dtype()}; "
                    f"use weights in one of {', '.join(_FLOAT_TYPES)}"
                )
            expected = shape[::-1] if transpose else shape
            check_shape(hf_name, tuple(stored.get_shape()), expected, source=str(path))
            return to_parameter(file.get_tensor(hf_name), dtype, transpose=transpose)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _is_buffer(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged or no safetensors file ({error}); fetch it again")
