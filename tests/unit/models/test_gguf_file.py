"""The GGUF container: equal to the reference reader, and safe on every kind of damage."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import LLAMA_JSON, write_gguf

from paxserve.models.gguf_file import open_gguf
from paxserve.models.gguf_source import read_gguf
from paxserve.models.hf_config import config_from_json
from paxserve.models.random_parameters import random_parameters

CONFIG = config_from_json(LLAMA_JSON)
PARAMS = random_parameters(CONFIG)
EXTRA = {"x.words": ["a", "\u4f60"], "x.numbers": [3, -1], "x.flag": True, "x.real": 0.5}


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, CONFIG, PARAMS, extra=EXTRA).read_bytes()


@pytest.fixture
def path(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_equals_the_reference_reader(tmp_path, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "a.gguf", CONFIG, PARAMS, extra=EXTRA, kind=quantisation)
    reference, file = gguf.GGUFReader(path), open_gguf(path)
    fields = {k: f.contents() for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == fields
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.read(tensor.name), values)
    assert file.tensors["blk.0.attn_q.weight"].type == quantisation


def test_every_truncation_of_the_header_is_named(tmp_path, content):
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 3000, 7), len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            open_gguf(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_headers_give_a_value_error_or_a_model(path, content, data):
    position = data.draw(st.integers(0, 2900))
    damage = data.draw(st.binary(min_size=1, max_size=9))
    path.write_bytes(content[:position] + damage + content[position + len(damage) :])
    try:
        model = read_gguf(path)
    except ValueError as error:
        assert "model.gguf" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert model.config.num_layers == 2


def kv(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def file_of(*, version=3, num_tensors=0, num_values=0, rest=b"", magic=b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def tensor(name=b"t", dims=(4,), kind=0, offset=0, num_dims=None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", count)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


DATA = b"\0" * 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GGUF", "ends inside its header"),
        (file_of(magic=b"GGML"), "does not start with GGUF"),
        (b"PK\x03\x04" + DATA, "does not start with GGUF"),
        (file_of(version=1), "version 1"),
        (file_of(version=4), "version 4"),
        (file_of(version=0x03000000), "little-endian"),
        (file_of(num_values=2**60), "ends inside"),
        (file_of(num_tensors=2**60), "ends inside"),
        (file_of(num_values=1, rest=struct.pack("<Q", 2**63) + DATA), "ends inside"),
        (file_of(num_values=1, rest=kv("k", 8, struct.pack("<Q", 2**40))), "ends inside"),
        (file_of(num_values=1, rest=kv("k", 9, struct.pack("<IQ", 4, 2**60))), "ends inside"),
        (file_of(num_values=1, rest=kv("k", 9, struct.pack("<IQ", 8, 2**60))), "ends inside"),
        (file_of(num_values=1, rest=kv("k", 9, struct.pack("<IQ", 9, 5)) + DATA), "nests arrays"),
        (file_of(num_values=1, rest=kv("k", 99, DATA)), "99"),
        (file_of(num_values=1, rest=kv("k", 9, struct.pack("<IQ", 77, 1)) + DATA), "77"),
        (file_of(num_values=1, rest=struct.pack("<Q", 2) + b"\xff\xff" + DATA), "utf-8"),
        (file_of(num_values=2, rest=kv("k", 0, b"\1") * 2), "'k' appears twice"),
        (
            file_of(num_values=1, rest=kv("general.alignment", 4, struct.pack("<I", 0))),
            "general.alignment=0",
        ),
        (
            file_of(num_values=1, rest=kv("general.alignment", 4, struct.pack("<I", 24))),
            "general.alignment=24",
        ),
        (
            file_of(num_values=1, rest=kv("general.alignment", 8, struct.pack("<Q", 0))),
            "general.alignment=''",
        ),
        (file_of(num_tensors=1, rest=tensor(dims=(1,) * 5) + DATA), "5 dimensions"),
        (file_of(num_tensors=1, rest=tensor(dims=(), num_dims=0) + DATA), "0 dimensions"),
        (file_of(num_tensors=1, rest=tensor(num_dims=2**31) + DATA), "2147483648 dimensions"),
        (file_of(num_tensors=1, rest=tensor(dims=(0,)) + DATA), "not made of F32 blocks"),
        (file_of(num_tensors=1, rest=tensor(dims=(33,), kind=8) + DATA), "not made of Q8_0"),
        (file_of(num_tensors=1, rest=tensor(kind=250) + DATA), "250"),
        (file_of(num_tensors=1, rest=tensor(offset=4) + DATA), "not aligned to 32"),
        (file_of(num_tensors=1, rest=tensor(dims=(1000,)) + DATA), "the file at"),
        (file_of(num_tensors=1, rest=tensor(offset=2**62) + DATA), "the file at"),
        (file_of(num_tensors=1, rest=tensor(dims=(2**33, 2**33)) + DATA), "the file at"),
        (file_of(num_tensors=2, rest=tensor() + tensor(offset=32) + DATA), "name appears twice"),
        (
            file_of(num_tensors=2, rest=tensor(dims=(16,)) + tensor(b"u", offset=32) + DATA),
            "overlaps",
        ),
    ],
)
def test_hostile_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        open_gguf(path)
    assert "bad.gguf" in str(raised.value)


def test_a_directory_or_absent_file_is_refused_by_name(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ValueError, match=str(path)):
            open_gguf(path)


def test_an_unsupported_quantisation_is_named(tmp_path):
    path = tmp_path / "q.gguf"
    path.write_bytes(file_of(num_tensors=1, rest=tensor(dims=(256,), kind=15) + b"\0" * 512))
    with pytest.raises(ValueError, match="type Q8_K"):
        open_gguf(path).read("t")
