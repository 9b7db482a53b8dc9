"""The GGUF container: metadata and tensors of one file, every count checked before use.

Owns: the byte layout, its bounds, and de-quantising one tensor. In: a path to an untrusted file.
Out: plain metadata values and float32 arrays. Must not know: models, tokenizers.

The header is walked here and not by `gguf.GGUFReader`, which trusts the file's counts (an array
said to hold 2**60 numbers keeps it busy until memory ends); the tables of types and the
de-quantisation are that package's.

Source: the GGUF specification of the ggml project, versions 2 and 3.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


class GgufTensor(NamedTuple):
    """Where one tensor lies. `shape` is in numpy order: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """An open GGUF file. Invariant: every tensor's bytes lie inside the mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: npt.NDArray[np.uint8]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """De-quantise one tensor.

        Returns:
            Values in the tensor's shape; may be a view of the mapped file.

        Raises:
            ValueError: its quantisation type cannot be read.
        """
        tensor = self.tensors[name]
        raw = self.data[tensor.offset : tensor.offset + tensor.num_bytes]
        try:
            with np.errstate(all="ignore"):  # damaged scales may overflow; that is no crash
                values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.type)
        except NotImplementedError as error:
            raise ValueError(
                f"{name} in {self.path} has type {tensor.type.name}, which is not supported; "
                "convert the file to F16, Q8_0 or Q4_1"
            ) from error
        return np.asarray(values, np.float32).reshape(tensor.shape)


def open_gguf(path: Path) -> GgufFile:
    """Map the file and read its header; no tensor data is read yet.

    Raises:
        ValueError: not a GGUF file, an unknown version, truncated, or inconsistent.
    """
    try:
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error
    try:
        return _parse(path, data)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged or no GGUF file ({error}); fetch it again") from error


def _parse(path: Path, data: npt.NDArray[np.uint8]) -> GgufFile:
    cursor = _Cursor(memoryview(data))
    if bytes(cursor.take(4)) != _MAGIC:
        raise ValueError("it does not start with GGUF")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS}, little-endian")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} is no power of two")
    infos = [_tensor(cursor, alignment) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors = [info._replace(offset=start + info.offset) for info in infos]
    _check_layout(tensors, data.size)
    return GgufFile(path=path, metadata=metadata, tensors={t.name: t for t in tensors}, data=data)


def _tensor(cursor: "_Cursor", alignment: int) -> GgufTensor:
    """One entry of the tensor table; its offset still counts from the start of the data."""
    name = cursor.text()
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions, allowed are 1 to {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    kind = GGMLQuantizationType(cursor.scalar("I"))
    offset = cursor.scalar("Q")
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    num_values = 1
    for size in shape:
        num_values *= size
    if num_values < 1 or shape[-1] % block_values:
        raise ValueError(f"tensor {name!r} of shape {shape} is not made of {kind.name} blocks")
    if offset % alignment:
        raise ValueError(f"tensor {name!r} at offset {offset} is not aligned to {alignment}")
    return GgufTensor(name, shape, kind, offset, num_values // block_values * block_bytes)


def _check_layout(tensors: list[GgufTensor], file_bytes: int) -> None:
    """Names are unique, and the tensors lie apart and inside the file."""
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("a tensor name appears twice")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ValueError(f"tensor {tensor.name!r} overlaps another")
        end = tensor.offset + tensor.num_bytes
        if end > file_bytes:
            raise ValueError(f"tensor {tensor.name!r} ends at {end}, the file at {file_bytes}")


class _Cursor:
    """Reads forward through a buffer. Invariant: 0 <= position <= len(buffer)."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.position = 0

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self.buffer) - self.position:
            raise ValueError(f"it ends inside its header, at byte {len(self.buffer)}")
        start = self.position
        self.position += num_bytes
        return self.buffer[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return bytes(self.take(self.scalar("Q"))).decode("utf-8")

    def value(self, kind: int) -> Any:
        kind = GGUFValueType(kind)
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array(GGUFValueType(self.scalar("I")), self.scalar("Q"))
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it nests arrays in arrays")
        code = _SCALARS[kind]
        raw = self.take(count * struct.calcsize("<" + code))
        values = np.frombuffer(raw, np.dtype("<" + code)) if count else np.empty(0)
        return list(values.tolist())
