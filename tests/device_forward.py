"""The logits of every position, through the device code and a paged cache full of NaN."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxserve.device.buckets import Bucket, Buckets
from paxserve.device.kv_blocks import Kernel, Kv, KvLayout
from paxserve.device.llama import Llama
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.pack import Packer
from paxserve.step import RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

NUM_ROWS = 2


def device_logits(
    config: ModelConfig,
    parameters: dict[str, np.ndarray],
    token_ids: Sequence[int],
    *,
    chunk: int = 13,
    block_size: int = 4,
    backend: str = "xla",
) -> np.ndarray:
    """Logits [T, V], computed `chunk` tokens at a time; the blocks lie in reverse order."""
    num_tokens = len(token_ids)
    per_row = -(-num_tokens // block_size)
    limits = Limits(
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=max(chunk, NUM_ROWS) + 3,
        max_model_len=num_tokens,
        block_size=block_size,
        num_blocks=per_row + 4,
    )
    buckets = Buckets((Bucket(limits.max_num_batched_tokens, NUM_ROWS),))
    packer = Packer(limits=limits, buckets=buckets, num_slots=limits.num_blocks * block_size)
    model = Llama(
        config,
        {name: jnp.asarray(value) for name, value in parameters.items()},
        max_model_len=num_tokens,
    )
    graph, state = nnx.split(model)
    layout = KvLayout(config, block_size, backend, jnp.dtype(parameters["embed"].dtype))
    kv = layout.allocate(limits.num_blocks, fill=float("nan"))

    @jax.jit
    def step(state: nnx.State, kv: Kv, arrays: Any) -> Any:
        merged = nnx.merge(graph, state)
        hidden, kv = merged.hidden(arrays.token_ids, kv, arrays, kernel=Kernel(backend))
        return merged.logits(hidden), kv

    found = []
    for start in range(0, num_tokens, chunk):
        tokens = tuple(token_ids[start : start + chunk])
        plan = StepPlan(
            step_id=start,
            rows=(RowPlan(0, 1, start, len(tokens), 0, tokens),),
            entries=() if start else (RowEntry(0, 1, num_tokens, RowSampling()),),
            table_writes=() if start else (TableWrite(1, 0, tuple(range(per_row, 0, -1))),),
        )
        logits, kv = step(state, kv, packer.pack(plan).arrays)
        found.append(np.asarray(logits)[: len(tokens)])
    return np.concatenate(found)
