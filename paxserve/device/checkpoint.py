"""Our own checkpoints: parameters by Orbax, straight onto a device or a sharded mesh.

Owns: the layout of a checkpoint directory and its check sums. In: a configuration and named
arrays. Out: the same, as jax arrays. Must not know: other weight formats.

A checkpoint is a directory with two entries:

    parameters/        one Orbax pytree, the flat {name: array}
    checkpoint.json    version, configuration, and size and SHA-256 of every file above

The JSON file is written last, so a checkpoint without it is incomplete. Nothing is pickled.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from paxserve.models.config import ModelConfig, RopeConfig, parameter_shapes
from paxserve.models.parameters import check_names, check_shape, parameter_dtype

Shape = tuple[int, ...]
Shardings = (
    jax.sharding.Sharding
    | Mapping[str, jax.sharding.Sharding]
    | Callable[[str, Shape], jax.sharding.Sharding]
)

_VERSION = 1
_PARAMETERS = "parameters"
_DESCRIPTION = "checkpoint.json"
_HASHED_AT_ONCE_BYTES = 2**20


def save(
    path: Path, config: ModelConfig, parameters: Mapping[str, jax.Array | np.ndarray[Any, Any]]
) -> None:
    """Write a checkpoint; called by one process.

    Args:
        path: a directory that does not exist yet.
        config: stored with the parameters.
        parameters: exactly those of `parameter_shapes(config)`.

    Raises:
        ValueError: the path exists, or names or shapes do not fit the configuration.
    """
    path = Path(path).absolute()
    if path.exists():
        raise ValueError(f"{path} exists; a checkpoint is never overwritten, choose another path")
    shapes = {name: tuple(array.shape) for name, array in parameters.items()}
    _check(shapes, config, source="the given parameters")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / _PARAMETERS, dict(parameters))
    description = {"version": _VERSION, "config": asdict(config), "files": _file_sums(path)}
    _write_last(path / _DESCRIPTION, json.dumps(description, indent=1))


def restore(
    path: Path, *, sharding: Shardings | None = None, dtype: str | None = None
) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """Read a checkpoint; every file is verified before any is parsed.

    Args:
        path: what `save` wrote.
        sharding: where arrays go: one sharding for all, a mapping by name, or a function of
            name and shape. None is the first device.
        dtype: float32 or bfloat16; None keeps what is stored.

    Raises:
        ValueError: the checkpoint is missing, incomplete or damaged, its names or shapes do not
            fit its configuration, or a parameter has no sharding.
    """
    path = Path(path).absolute()
    description = _description(path)
    config = _config(path, description["config"])
    if description["files"] != _file_sums(path):
        raise ValueError(f"{path} is damaged: its files are not those that were saved; copy again")
    try:
        return config, _restore_arrays(path, config, sharding, dtype)
    except ValueError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise ValueError(f"{path} cannot be restored: {error}") from error


def _restore_arrays(
    path: Path, config: ModelConfig, sharding: Shardings | None, dtype: str | None
) -> dict[str, jax.Array]:
    with ocp.StandardCheckpointer() as checkpointer:
        stored = dict(checkpointer.metadata(path / _PARAMETERS).item_metadata)
        _check({name: tuple(m.shape) for name, m in stored.items()}, config, source=str(path))
        wanted = {
            name: jax.ShapeDtypeStruct(
                meta.shape,
                meta.dtype if dtype is None else parameter_dtype(dtype),
                sharding=_sharding_of(name, tuple(meta.shape), sharding),
            )
            for name, meta in stored.items()
        }
        restored = checkpointer.restore(path / _PARAMETERS, wanted)
    return {name: restored[name] for name in parameter_shapes(config)}


def _sharding_of(name: str, shape: Shape, sharding: Shardings | None) -> jax.sharding.Sharding:
    if sharding is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        return sharding
    if isinstance(sharding, Mapping):
        if name not in sharding:
            raise ValueError(f"no sharding for parameter {name!r}; add it to the mapping")
        return sharding[name]
    return sharding(name, shape)


def _check(shapes: Mapping[str, Shape], config: ModelConfig, *, source: str) -> None:
    expected = parameter_shapes(config)
    check_names(shapes, expected, source=source)
    for name, shape in expected.items():
        check_shape(name, shapes[name], shape, source=source)


def _description(path: Path) -> dict[str, Any]:
    try:
        value = json.loads((path / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no complete checkpoint, {_DESCRIPTION} cannot be read: {error}"
        ) from error
    if not isinstance(value, dict) or value.get("version") != _VERSION:
        raise ValueError(f"{path / _DESCRIPTION} is not of version {_VERSION}")
    if not isinstance(value.get("config"), dict) or not isinstance(value.get("files"), dict):
        raise ValueError(f"{path / _DESCRIPTION} is damaged: it needs config and files")
    return value


def _config(path: Path, stored: dict[str, Any]) -> ModelConfig:
    try:
        lists = {key: tuple(stored[key]) for key in ("layer_windows", "eos_token_ids")}
        return ModelConfig(**{**stored, **lists, "rope": RopeConfig(**stored["rope"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / _DESCRIPTION} is damaged: bad config ({error})") from error


def _file_sums(path: Path) -> dict[str, list[Any]]:
    """Relative name -> [bytes, SHA-256] of every parameter file; links are not followed."""
    sums: dict[str, list[Any]] = {}
    for file in sorted((path / _PARAMETERS).rglob("*")):
        if file.is_symlink():
            raise ValueError(f"{file} is a link; a checkpoint holds files only")
        if file.is_file():
            sums[str(file.relative_to(path))] = [file.stat().st_size, _sha256(file)]
    return sums


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_HASHED_AT_ONCE_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _write_last(path: Path, text: str) -> None:
    """Write whole or not at all: temporary name, fsync, rename."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
