"""D1-D3: bytes per token, and how many requests that lets in.

The bytes are those of the arrays that the device would allocate, the requests those that an engine
of that size really runs at once.
"""

from collections.abc import Iterator
from dataclasses import replace

from paxserve.claims import Claim, Row, Scale
from paxserve.claims.constant import Constant
from paxserve.claims.serving import ask, make_engine, make_limits, policies
from paxserve.models.config import ModelConfig
from paxserve.models.llama3 import LLAMA_3_70B
from paxserve.sizing import pool_size

GIB = 2**30
SPARE_BYTES = 140 * GIB
NUM_TOKENS = 4096
_BLOCK_SIZE = 16

WITH_64_KV_HEADS = replace(LLAMA_3_70B, num_kv_heads=64)

D1 = Row(
    "D1",
    "KV of Llama-3-70B (80 layers, 8 KV heads, head_dim 128) in bfloat16",
    {
        "bytes per token and layer": 4096,
        "bytes per token": 327_680,
        "GiB per 4,096 tokens": 1.25,
    },
)
D2 = Row("D2", "140 GiB of spare memory", {"requests of 4,096 tokens": 112})
D3 = Row(
    "D3",
    "The same with 64 KV heads (MHA)",
    {"GiB per request": 10.0, "requests of 4,096 tokens": 14},
)


def sizing(scale: Scale) -> Iterator[Claim]:
    """D1 to D3."""
    num_bytes = _bytes_per_block(LLAMA_3_70B) // _BLOCK_SIZE
    yield D1.measured(
        {
            "bytes per token and layer": _bytes_per_block(
                replace(LLAMA_3_70B, num_layers=1, layer_windows=())
            )
            // _BLOCK_SIZE,
            "bytes per token": num_bytes,
            "GiB per 4,096 tokens": num_bytes * NUM_TOKENS / GIB,
        }
    )
    yield D2.measured({"requests of 4,096 tokens": _num_at_once(LLAMA_3_70B)})
    yield D3.measured(
        {
            "GiB per request": _bytes_per_block(WITH_64_KV_HEADS) / _BLOCK_SIZE * NUM_TOKENS / GIB,
            "requests of 4,096 tokens": _num_at_once(WITH_64_KV_HEADS),
        }
    )


def _bytes_per_block(config: ModelConfig) -> int:
    from paxserve.device.kv_blocks import KvLayout, kv_dtype  # imports jax

    layout = KvLayout(config, _BLOCK_SIZE, "xla", kv_dtype("auto", activations="bfloat16"))
    return layout.bytes_per_block


def _num_at_once(config: ModelConfig) -> int:
    """Requests that run after one step, of more that ask for 4,096 tokens each."""
    bytes_per_block = _bytes_per_block(config)
    size = pool_size(
        platform="gpu",
        free_bytes=0,
        weight_bytes=0,
        step_bytes=0,
        bytes_per_block=bytes_per_block,
        block_size=_BLOCK_SIZE,
        max_num_seqs=256,
        max_model_len=NUM_TOKENS,
        memory_utilization=1.0,
        kv_cache_memory_bytes=SPARE_BYTES + bytes_per_block,  # beside the null block
    )
    limits = make_limits(max_num_seqs=256, max_model_len=NUM_TOKENS, num_blocks=size.num_blocks)
    engine = make_engine(limits, policies(reservation="max"), executor=Constant())
    for _ in range(limits.max_num_seqs):
        ask(engine, 8, 2)
    engine.step()
    return engine.steps[0].num_running
