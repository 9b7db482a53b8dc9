"""What reading K and V through a block table costs attention (CLAIMS E1), on this machine's CPU.

Owns: decodes of equal rows over permuted blocks of several sizes, over one block per row, and over
contiguous K and V without any table, all timed in turns. In: sizes. Out: seconds per round. Must
not know: models that are served, the engine.
"""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import backend_module, paged_attention
from kernels_pallas.shapes import MODELS

HEADS = MODELS["smollm2-135m"]
BLOCK_SIZES = (16, 32, 64, 128)
BASE, CONTIGUOUS = "one block per row", "jax.nn.dot_product_attention"
_BACKEND = "xla"

type Run = Callable[[], object]


def timed_gathering(*, num_rows: int, context: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each way per round, by name.

    Args:
        num_rows: decodes, each of one token.
        context: tokens that each reads; a multiple of every block size.
        num_rounds: each way runs once in a round, so noise of the machine meets all.
    """
    ways = {BASE: _paged(num_rows, context, context), CONTIGUOUS: _contiguous(num_rows, context)}
    ways |= {f"blocks of {size}": _paged(num_rows, context, size) for size in BLOCK_SIZES}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, run in ways.items():
            started_s = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started_s)
    return seconds


def _paged(num_rows: int, context: int, block_size: int) -> Run:
    per_row = context // block_size
    num_blocks = 1 + num_rows * per_row
    shape = backend_module(_BACKEND).LAYOUT.kv_shape(
        num_blocks, block_size, HEADS.num_kv_heads, HEADS.head_dim
    )
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).astype(np.int32)
    arguments = (
        jnp.full((num_rows, HEADS.num_heads, HEADS.head_dim), 0.1),
        jnp.full(shape, 0.01),
        jnp.asarray(ids.reshape(num_rows, per_row)),
        jnp.full(num_rows, context, jnp.int32),
        jnp.arange(num_rows + 1, dtype=jnp.int32),
        jnp.int32(num_rows),
    )
    attend = jax.jit(partial(paged_attention, scale=HEADS.head_dim**-0.5, backend=_BACKEND))
    return _ready(attend, *arguments)


def _contiguous(num_rows: int, context: int) -> Run:
    shape = (num_rows, context, HEADS.num_kv_heads, HEADS.head_dim)
    q = jnp.full((num_rows, 1, HEADS.num_heads, HEADS.head_dim), 0.1)
    kv = jnp.full(shape, 0.01)
    return _ready(jax.jit(jax.nn.dot_product_attention), q, kv, kv)


def _ready(attend: Callable[..., jax.Array], *arguments: jax.Array) -> Run:
    attend(*arguments).block_until_ready()
    return lambda: attend(*arguments).block_until_ready()
