"""The device model against a plain numpy one: every option of a configuration, all logits."""

import jax.numpy as jnp
import numpy as np
import pytest
from device_forward import device_logits
from numpy_llama import logits
from real_builders import keep_compiled_programs, random_ids

from paxserve.models.config import ModelConfig, RopeConfig
from paxserve.models.random_parameters import random_parameters

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "mlp_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": 64,
}
CONFIGS = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "head_dim wider than hidden_size / heads": {"head_dim": 24},
    "one kv head": {"num_kv_heads": 1, "tie_embeddings": True},
    "as many kv heads as heads": {"num_kv_heads": 4},
    "qkv bias": {"qkv_bias": True},
    "output and mlp bias": {"output_bias": True, "mlp_bias": True},
    "all biases, tied": {
        "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_embeddings": True,
    },
    "a window in every layer": {"layer_windows": (7, 7)},
    "a window of one token": {"layer_windows": (1, None)},
    "windows per layer": {"num_layers": 3, "layer_windows": (None, 5, 16)},
    "linear rope": {"rope": RopeConfig(theta=100.0, type="linear", factor=3.0)},
    "llama3 rope": {
        "rope": RopeConfig(theta=1000.0, type="llama3", factor=8.0, original_max_position=16),
    },
    "another epsilon": {"rms_norm_eps": 0.1},
}  # fmt: skip


def model(**options):
    """A configuration, and weights in which every norm and bias matters."""
    config = ModelConfig(**(SMALL | options))
    parameters = random_parameters(config, seed=5)
    rng = np.random.default_rng(6)
    for name, values in parameters.items():
        if name.endswith("norm"):
            parameters[name] = rng.uniform(0.5, 1.5, values.shape).astype(np.float32)
        elif name.endswith("bias"):
            parameters[name] = values * np.float32(25)
    return config, parameters


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_all_logits_equal_the_oracle_s(options):
    keep_compiled_programs()
    config, parameters = model(**options)
    ids = random_ids(45, vocab_size=97)
    found = device_logits(config, parameters, ids)
    expected = logits(config, parameters, ids)
    assert found.dtype == np.float32
    assert found.shape == (45, 97)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["float32"], rtol=0)


PLAIN = {
    "tie_embeddings": False, "qkv_bias": False, "output_bias": False, "mlp_bias": False,
    "layer_windows": (), "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in CONFIGS if {*PLAIN, "rope"} & {*CONFIGS[n]}])
def test_every_switch_changes_the_oracle_s_logits(name):
    """Else the comparison above would show nothing."""
    config, parameters = model(**CONFIGS[name])
    ids = random_ids(45, vocab_size=97)
    plain = PLAIN | {"rope": RopeConfig(theta=config.rope.theta)}
    switched = {key: plain[key] for key in CONFIGS[name] if key in plain}
    without = ModelConfig(**(SMALL | CONFIGS[name] | switched))
    weights = {k: v for k, v in parameters.items() if not k.endswith("bias")}
    weights |= {"lm_head": random_parameters(without, seed=5).get("lm_head")}
    gap = np.abs(logits(config, parameters, ids) - logits(without, weights, ids)).max()
    assert gap > 100 * TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("chunk", "block_size"), [(1, 16), (2, 3), (16, 1), (16, 16), (45, 1), (45, 3)]
)
def test_chunks_and_blocks_do_not_matter(chunk, block_size):
    keep_compiled_programs()
    config, parameters = model(qkv_bias=True, layer_windows=(None, 9))
    ids = random_ids(45, vocab_size=97)
    found = device_logits(config, parameters, ids, chunk=chunk, block_size=block_size)
    expected = logits(config, parameters, ids)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["float32"], rtol=0)


def test_the_reference_backend_agrees():
    config, parameters = model(layer_windows=(None, 9))
    ids = random_ids(45, vocab_size=97)
    found = device_logits(config, parameters, ids, backend="reference")
    expected = logits(config, parameters, ids)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["float32"], rtol=0)


def test_bfloat16_stays_near_float32():
    config, parameters = model(qkv_bias=True)
    ids = random_ids(45, vocab_size=97)
    narrow = {name: value.astype(jnp.bfloat16) for name, value in parameters.items()}
    found = device_logits(config, narrow, ids)
    expected = logits(config, parameters, ids)
    assert found.dtype == np.float32
    gap = np.abs(found - expected)
    assert 1e-3 < gap.max() < TOLERANCE["bfloat16"]
