"""What reading K and V through a block table costs the attention kernel (CLAIMS E1)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.timing import Run, interleaved, report
from kernels_pallas.paged_attention import backend_module, paged_attention
from kernels_pallas.shapes import MODELS

HEADS = MODELS["smollm2-135m"]
NUM_ROWS, CONTEXT = 64, 1024
BLOCK_SIZES = (16, 32, 64, 128)
BACKEND = "xla"
NUM_ROUNDS = 31


def run() -> None:
    """Decode of equal rows: blocks of several sizes, permuted, and contiguous attention, each
    against one block per row.
    """
    contiguous = _contiguous()
    runs = [_paged(CONTEXT), contiguous, *[_paged(size) for size in BLOCK_SIZES]]
    rounds = list(zip(*interleaved(NUM_ROUNDS, *runs), strict=True))
    names = ["jax.nn.dot_product_attention", *[f"blocks of {size}" for size in BLOCK_SIZES]]
    for name, seconds in zip(names, rounds[1:], strict=True):
        report(f"paging: {NUM_ROWS} x {CONTEXT}, {name} / one block per row",
               seconds, rounds[0], None)  # fmt: skip


def _paged(block_size: int) -> Run:
    per_row = CONTEXT // block_size
    num_blocks = 1 + NUM_ROWS * per_row
    shape = backend_module(BACKEND).LAYOUT.kv_shape(
        num_blocks, block_size, HEADS.num_kv_heads, HEADS.head_dim
    )
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).astype(np.int32)
    arguments = (
        jnp.full((NUM_ROWS, HEADS.num_heads, HEADS.head_dim), 0.1),
        jnp.full(shape, 0.01),
        jnp.asarray(ids.reshape(NUM_ROWS, per_row)),
        jnp.full(NUM_ROWS, CONTEXT, jnp.int32),
        jnp.arange(NUM_ROWS + 1, dtype=jnp.int32),
        jnp.int32(NUM_ROWS),
    )
    attend = jax.jit(partial(paged_attention, scale=HEADS.head_dim**-0.5, backend=BACKEND))
    return _ready(attend, *arguments)


def _contiguous() -> Run:
    shape = (NUM_ROWS, CONTEXT, HEADS.num_kv_heads, HEADS.head_dim)
    q = jnp.full((NUM_ROWS, 1, HEADS.num_heads, HEADS.head_dim), 0.1)
    return _ready(
        jax.jit(jax.nn.dot_product_attention), q, jnp.full(shape, 0.01), jnp.full(shape, 0.01)
    )


def _ready(attend: Callable[..., jax.Array], *arguments: jax.Array) -> Run:
    attend(*arguments).block_until_ready()
    return lambda: attend(*arguments).block_until_ready()
