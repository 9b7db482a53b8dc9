"""Counts that follow from a model's sizes, by hand and against the shapes that the device has."""

import math

import pytest
from cost_builders import HEAD_WEIGHTS, KV_BYTES_PER_TOKEN, LAYER_WEIGHTS, small_model

from paxserve.device.kv_blocks import KvLayout, kv_dtype
from paxserve.models.config import ModelConfig, parameter_shapes
from paxserve.models.dimensions import Dimensions
from paxserve.models.llama3 import LLAMA_3_8B, LLAMA_3_70B

MODELS = [LLAMA_3_8B, LLAMA_3_70B]


def test_weights_by_hand():
    model = small_model()
    assert (model.num_layer_weights, model.num_head_weights) == (LAYER_WEIGHTS, HEAD_WEIGHTS)
    assert model.num_weights == 2 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS
    assert model.weight_bytes == 2 * model.num_weights
    assert small_model(tie_embeddings=True).num_weights == 2 * LAYER_WEIGHTS + HEAD_WEIGHTS
    assert small_model(gated_mlp=False).num_layer_weights == LAYER_WEIGHTS - 8 * 16
    assert small_model(dtype="float32").weight_bytes == 4 * model.num_weights


def test_kv_by_hand():
    assert small_model().kv_bytes_per_token() == KV_BYTES_PER_TOKEN
    assert small_model(dtype="float32").kv_bytes_per_token() == 2 * KV_BYTES_PER_TOKEN
    assert small_model().kv_bytes_per_token("fp8") == 2 * 2 * 2 * (4 + 4)


@pytest.mark.parametrize("config", MODELS, ids=["8b", "70b"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_they_are_those_of_the_arrays(config: ModelConfig, kv_cache_dtype):
    model = Dimensions.of(config, dtype="bfloat16")
    matrices = [math.prod(s) for s in parameter_shapes(config).values() if len(s) == 2]
    assert model.num_weights == sum(matrices)
    layout = KvLayout(config, 16, "xla", kv_dtype(kv_cache_dtype, activations="bfloat16"))
    assert model.kv_bytes_per_token(kv_cache_dtype) * 16 == layout.bytes_per_block


def test_norms_are_a_ten_thousandth():
    vectors = [math.prod(s) for s in parameter_shapes(LLAMA_3_8B).values() if len(s) == 1]
    assert sum(vectors) < 1e-4 * Dimensions.of(LLAMA_3_8B, dtype="bfloat16").num_weights


def test_a_share_of_the_model():
    part = small_model(vocab_size=33).share(2)
    assert (part.num_heads, part.num_kv_heads, part.mlp_size) == (2, 1, 8)
    assert part.vocab_size == 17  # padded
    assert (part.num_layers, part.hidden_size, part.head_dim) == (2, 8, 4)
    assert small_model().share(1) == small_model()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"dtype": "float8"}, "dtype must be one of float32, .*, got 'float8'"),
        ({"dtype": ["int8"]}, r"dtype must be one of float32, .*, got \['int8'\]"),
    ],
)
def test_models_that_there_are_not(changed, message):
    with pytest.raises(ValueError, match=message):
        small_model(**changed)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2", None])
def test_groups_that_there_are_not(count):
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer from 1"):
        small_model().share(count)


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "", None])
def test_caches_that_there_are_not(dtype):
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, int8, fp8, got"):
        small_model().kv_bytes_per_token(dtype)
