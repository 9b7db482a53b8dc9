"""A model and a device whose numbers can be multiplied in the head."""

from typing import Any

from paxserve.cost_model import Target
from paxserve.cost_model.roofline import Roofline
from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions

# Per layer, as (in, out): qkv (8, 32), o (16, 8), gate and up (8, 32), down (16, 8).
LAYER_WEIGHTS = 256 + 128 + 256 + 128
HEAD_WEIGHTS = 8 * 32
CROSSING = 40 + 24 + 40 + 24 + 4 * 8  # in and out of each product, and four times the residual
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 4 * 2  # K and V, layers, heads, channels, bytes


def small_model(**changed: Any) -> Dimensions:
    """Two layers of 8 channels, 4 heads over 2 KV heads of 4 channels, 2 bytes each."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 8,
        "mlp_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 32,
        "max_position": 64,
    }
    return Dimensions(**(sizes | changed))


def small_hardware(**changed: Any) -> Hardware:
    """1,000 FLOP/s in bfloat16, 100 B/s, 50 B/s over links, whole tiles of one token. A number as
    `flop_per_s` is that of bfloat16.
    """
    numbers = {
        "name": "small",
        "flop_per_s": {"bfloat16": 1000.0},
        "bytes_per_s": 100.0,
        "memory_bytes": 1_000_000_000,
        "reserved_bytes": 1000,
        "link_bytes_per_s": 50.0,
        "all_reduce_latency_s": 0.5,
        "host_link_bytes_per_s": 10.0,
        "tile_tokens": 1,
        "compile_target": None,
        "platform": "gpu",
    }
    if isinstance(changed.get("flop_per_s"), float):
        changed["flop_per_s"] = {"bfloat16": changed["flop_per_s"]}
    return Hardware(**(numbers | changed))


def roofline(**changed: Any) -> Roofline:
    """The data sheet's rates, and no host, unless told otherwise."""
    values = {
        "compute_efficiency": 1.0,
        "bandwidth_efficiency": 1.0,
        "link_efficiency": 1.0,
        "host_s_per_step": 0.0,
        "host_s_per_row": 0.0,
    }
    return Roofline(**(values | changed))


def target(**changed: Any) -> Target:
    """The small model on one small device, blocks of 4 tokens."""
    given = {
        "model": small_model(),
        "hardware": small_hardware(),
        "num_devices": 1,
        "kv_cache_dtype": "auto",
        "block_size": 4,
    }
    return Target(**(given | changed))
