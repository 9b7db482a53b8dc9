"""What a model configuration refuses, and the list of parameters it implies."""

import pytest

from paxserve.models.config import ModelConfig, RopeConfig, parameter_shapes

SMALL = {
    "vocab_size": 8,
    "hidden_size": 4,
    "mlp_size": 6,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 2,
    "max_position": 16,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"max_position": 0}, "max_position must be at least 1"),
        ({"num_heads": 3, "num_kv_heads": 2}, "multiple of num_kv_heads=2"),
        ({"head_dim": 3}, "head_dim=3 must be even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"layer_windows": (4, 4)}, "2 entries for 1 layers"),
        ({"layer_windows": (0,)}, "sliding window must be at least 1"),
        ({"eos_token_ids": (1, 8)}, "token id 8"),
        ({"bos_token_id": -1}, "token id -1"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(SMALL | change))


@pytest.mark.parametrize(
    "rope",
    [
        {"theta": 0.0},
        {"theta": float("inf")},
        {"theta": float("nan")},
        {"type": "linear", "factor": 0.5},
        {"type": "llama3", "factor": float("inf")},
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"type": "llama3", "factor": 8.0, "original_max_position": 0},
    ],
)
def test_impossible_rotary_settings_are_refused(rope):
    with pytest.raises(ValueError, match="rope needs"):
        RopeConfig(**rope)


def test_layer_windows_default_to_full_attention():
    assert ModelConfig(**SMALL).layer_windows == (None,)


@pytest.mark.parametrize(
    ("change", "added", "dropped"),
    [
        ({}, {}, set()),
        ({"tie_embeddings": True}, {}, {"lm_head"}),
        (
            {"qkv_bias": True},
            {"layers.0.q_bias": (4,), "layers.0.k_bias": (2,), "layers.0.v_bias": (2,)},
            set(),
        ),
        ({"output_bias": True}, {"layers.0.o_bias": (4,)}, set()),
        (
            {"mlp_bias": True},
            {"layers.0.gate_bias": (6,), "layers.0.up_bias": (6,), "layers.0.down_bias": (4,)},
            set(),
        ),
    ],
)
def test_parameters_follow_the_options(change, added, dropped):
    plain = {
        "embed": (8, 4),
        "final_norm": (4,),
        "lm_head": (4, 8),
        "layers.0.attention_norm": (4,),
        "layers.0.q": (4, 4),
        "layers.0.k": (4, 2),
        "layers.0.v": (4, 2),
        "layers.0.o": (4, 4),
        "layers.0.mlp_norm": (4,),
        "layers.0.gate": (4, 6),
        "layers.0.up": (4, 6),
        "layers.0.down": (6, 4),
    }
    expected = {k: v for k, v in (plain | added).items() if k not in dropped}
    assert parameter_shapes(ModelConfig(**(SMALL | change))) == expected
