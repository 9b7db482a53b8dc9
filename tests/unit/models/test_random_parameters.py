"""Random weights: names, scale, and what the seed decides."""

import ml_dtypes
import numpy as np
import pytest
from model_files import LLAMA_JSON
from numpy_llama import logits

from paxserve.models.config import parameter_shapes
from paxserve.models.hf_config import config_from_json
from paxserve.models.load import TINY_CONFIG
from paxserve.models.random_parameters import random_parameters

CONFIG = config_from_json(LLAMA_JSON | {"attention_bias": True, "mlp_bias": True})


def test_names_shapes_and_type():
    for dtype, kind in (("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)):
        params = random_parameters(CONFIG, dtype=dtype)
        assert {n: a.shape for n, a in params.items()} == parameter_shapes(CONFIG)
        assert {a.dtype for a in params.values()} == {np.dtype(kind)}


def test_the_seed_decides_every_value():
    first, again, other = (random_parameters(CONFIG, seed=s) for s in (1, 1, 2))
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
        assert name.endswith("norm") or not np.array_equal(values, other[name])


def test_parameters_of_one_shape_differ():
    params = random_parameters(CONFIG)
    assert not np.array_equal(params["layers.0.q"], params["layers.1.q"])
    assert not np.array_equal(params["layers.0.gate"], params["layers.0.up"])


def test_an_option_moves_no_other_parameter():
    plain = random_parameters(config_from_json(LLAMA_JSON))
    with_bias = random_parameters(CONFIG)
    for name, values in plain.items():
        np.testing.assert_array_equal(values, with_bias[name])


@pytest.mark.parametrize("seed", range(3))
def test_logits_of_the_tiny_model_are_about_one(seed):
    ids = np.random.default_rng(seed).integers(0, 512, 20).tolist()
    found = logits(TINY_CONFIG, random_parameters(TINY_CONFIG, seed=seed), ids)
    assert np.isfinite(found).all()
    assert 0.5 < found.std() < 2.0
    assert (found.argmax(-1) != found[0].argmax()).any()


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"dtype='int8'.*float32, bfloat16"):
        random_parameters(CONFIG, dtype="int8")
