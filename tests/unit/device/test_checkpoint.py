"""Orbax checkpoints: round trip, onto a mesh, and every kind of damage."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from paxserve.device.checkpoint import restore, save
from paxserve.models.config import ModelConfig, RopeConfig
from paxserve.models.random_parameters import random_parameters

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    mlp_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position=64,
    qkv_bias=True,
    layer_windows=(8, None),
    rope=RopeConfig(type="llama3", factor=8.0),
    eos_token_ids=(1, 2),
)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint"
    save(path, CONFIG, random_parameters(CONFIG))
    return path


def test_round_trip_keeps_configuration_and_every_bit(saved):
    config, params = restore(saved)
    expected = random_parameters(CONFIG)
    assert config == CONFIG
    assert list(params) == list(expected)
    for name, array in params.items():
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(np.asarray(array), expected[name])


def test_bfloat16_is_kept_and_float32_can_be_restored_as_bfloat16(tmp_path, saved):
    low = random_parameters(CONFIG, dtype="bfloat16")
    save(tmp_path / "low", CONFIG, low)
    for params in (restore(tmp_path / "low")[1], restore(saved, dtype="bfloat16")[1]):
        assert params["embed"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(params["embed"]), low["embed"])


def test_no_file_is_a_pickle(saved):
    for file in saved.rglob("*"):
        if file.is_file():
            assert file.suffix not in (".pkl", ".pickle", ".npy", ".pt")
            assert not file.read_bytes().startswith(b"\x80\x04")


def test_an_existing_path_is_not_overwritten(saved):
    with pytest.raises(ValueError, match="never overwritten"):
        save(saved, CONFIG, random_parameters(CONFIG))


def test_save_refuses_missing_unexpected_and_misshapen(tmp_path):
    params = random_parameters(CONFIG)
    del params["final_norm"]
    params["extra"] = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r"missing \[final_norm\].*unexpected \[extra\]"):
        save(tmp_path / "a", CONFIG, params)
    params = random_parameters(CONFIG) | {"embed": np.zeros((3, 16), np.float32)}
    with pytest.raises(ValueError, match=r"embed.*\(3, 16\).*\(32, 16\)"):
        save(tmp_path / "b", CONFIG, params)
    assert list(tmp_path.iterdir()) == []


def test_restore_refuses_a_configuration_that_does_not_fit(saved):
    description = json.loads((saved / "checkpoint.json").read_text())
    description["config"]["tie_embeddings"] = True
    (saved / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"unexpected \[lm_head\]"):
        restore(saved)
    description["config"] |= {"tie_embeddings": False, "mlp_size": 25}
    (saved / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"\(16, 24\).*\(16, 25\)"):
        restore(saved)


def test_every_truncated_flipped_or_removed_file_is_noticed(saved):
    files = [file for file in saved.rglob("*") if file.is_file() and file.stat().st_size]
    assert len(files) > 3
    for file in files:
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 0x10
        for damage in (content[:-1], content[: len(content) // 2], b"", bytes(flipped)):
            if file.name == "checkpoint.json" and damage == bytes(flipped):
                continue  # the description is not summed; its values are checked below
            file.write_bytes(damage)
            with pytest.raises(ValueError, match="checkpoint"):
                restore(saved)
        file.unlink()
        with pytest.raises(ValueError, match="checkpoint"):
            restore(saved)
        file.write_bytes(content)
    assert restore(saved)[0] == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version"),
        ({"config": None}, "config and files"),
        ({"files": []}, "config and files"),
        ({"config": {}}, "bad config"),
    ],
)
def test_a_wrong_description_is_an_error(saved, change, message):
    description = json.loads((saved / "checkpoint.json").read_text()) | change
    (saved / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=message):
        restore(saved)


def test_a_link_in_a_checkpoint_is_refused(saved, tmp_path):
    (tmp_path / "outside").write_text("x")
    (saved / "parameters" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="is a link"):
        restore(saved)


def test_an_absent_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        restore(tmp_path / "nothing")


def test_a_parameter_without_sharding_is_an_error(saved):
    with pytest.raises(ValueError, match="no sharding for parameter"):
        restore(saved, sharding={})


MESH_PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from paxserve.device.checkpoint import restore
from paxserve.models.random_parameters import random_parameters

mesh = Mesh(np.array(jax.devices()).reshape(4), ("model",))
def place(name, shape):
    columns = name.endswith((".q", ".gate", ".up"))
    return NamedSharding(mesh, P(None, "model") if columns else P())
config, params = restore(Path(sys.argv[1]), sharding=place)
for name, expected in random_parameters(config).items():
    np.testing.assert_array_equal(np.asarray(params[name]), expected)
    assert params[name].sharding == place(name, expected.shape)
print({s.data.shape for s in params["layers.0.q"].addressable_shards},
      len(params["layers.0.q"].sharding.device_set))
placed = {name: place(name, a.shape) for name, a in params.items()}
by_name = restore(Path(sys.argv[1]), sharding=placed)[1]
assert by_name["layers.1.up"].sharding == placed["layers.1.up"]
everywhere = restore(Path(sys.argv[1]), sharding=NamedSharding(mesh, P()))[1]
print(len(everywhere["embed"].sharding.device_set))
"""


def test_restores_onto_a_mesh_of_four_devices(saved):
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-c", MESH_PROGRAM, str(saved)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["{(16, 4)} 4", "4"]


def test_every_field_of_the_configuration_survives(tmp_path):
    config = replace(CONFIG, bos_token_id=3, output_bias=True, mlp_bias=True, tie_embeddings=True)
    save(tmp_path / "c", config, random_parameters(config))
    assert restore(tmp_path / "c")[0] == config
