"""A Llama forward pass in plain numpy: the oracle that loaded weights are judged by."""

import numpy as np

from paxserve.models.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    freq = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.type == "linear":
        return freq / rope.factor
    if rope.type == "default":
        return freq
    wavelength = 2 * np.pi / freq
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0, 1)
    return (1 - smooth) * freq / rope.factor + smooth * freq


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, rope: RopeConfig) -> np.ndarray:
    num_tokens, _, head_dim = x.shape
    angle = np.arange(num_tokens)[:, None] * inverse_frequencies(rope, head_dim)[None]
    cos, sin = (f(angle)[:, None].astype(x.dtype) for f in (np.cos, np.sin))
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    num_tokens, num_heads, head_dim = q.shape
    k, v = (np.repeat(x, num_heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qnh,knh->nqk", q, k) * head_dim**-0.5
    gap = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None]
    seen = (gap >= 0) & (gap < (window or num_tokens))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nqk,knh->qnh", weights, v).reshape(num_tokens, -1)


def logits(config: ModelConfig, params: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits [T, V] of every position, in the dtype of the parameters."""
    c, p = config, params
    x = p["embed"][np.asarray(ids)]
    for i in range(c.num_layers):
        layer = {k.removeprefix(f"layers.{i}."): v for k, v in p.items() if f"layers.{i}." in k}

        def linear(h, name, layer=layer):
            return h @ layer[name] + layer.get(f"{name}_bias", np.float32(0))

        h = _norm(x, layer["attention_norm"], c.rms_norm_eps)
        q, k, v = (linear(h, n).reshape(len(ids), -1, c.head_dim) for n in "qkv")
        mixed = _attend(_rotate(q, c.rope), _rotate(k, c.rope), v, c.layer_windows[i])
        x = x + linear(mixed, "o")
        h = _norm(x, layer["mlp_norm"], c.rms_norm_eps)
        gate = linear(h, "gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, "up"), "down")
    head = p["embed"].T if c.tie_embeddings else p["lm_head"]
    return _norm(x, p["final_norm"], c.rms_norm_eps) @ head
