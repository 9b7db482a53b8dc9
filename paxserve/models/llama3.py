"""Dimensions of Llama 3, for whoever asks what such a model takes without having its weights.

Owns: the numbers. Source: "The Llama 3 Herd of Models", 2024, table 3, and the models'
`config.json`.
"""

from paxserve.models.config import ModelConfig, RopeConfig

_VOCAB_SIZE, _MAX_POSITION = 128_256, 8192
_ROPE = RopeConfig(theta=500_000.0)

LLAMA_3_8B = ModelConfig(
    vocab_size=_VOCAB_SIZE,
    hidden_size=4096,
    mlp_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=_MAX_POSITION,
    rope=_ROPE,
)
LLAMA_3_70B = ModelConfig(
    vocab_size=_VOCAB_SIZE,
    hidden_size=8192,
    mlp_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_position=_MAX_POSITION,
    rope=_ROPE,
)
