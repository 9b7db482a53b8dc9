"""Problems for the kernel tests: a poisoned pool, a permuted block table, a dense numpy oracle.

Everything is numpy float32 until a test turns it into device arrays, so the oracle shares no code
with any backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kernels_pallas.paged_attention import backend_module, paged_attention

# One jitted function for all tests: problems of equal shapes share a compile.
jitted_attention = jax.jit(paged_attention, static_argnames=("scale", "sliding_window", "backend"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One ragged attention problem: what a kernel gets, and the dense contexts it stands for."""

    q: NDArray[np.float32]  # [T, N, H]
    dense: list[NDArray[np.float32]]  # per row [2, context, K, H]
    block_table: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    cu_q_lens: NDArray[np.int32]
    num_rows: int
    num_blocks: int
    block_size: int
    scale: float

    def slots(self, row: int) -> NDArray[np.int32]:
        position = np.arange(self.context_lens[row])
        block = self.block_table[row, position // self.block_size]
        return (block * self.block_size + position % self.block_size).astype(np.int32)

    def kv_blocks(self, backend: str, dtype: jnp.dtype) -> jax.Array:
        """The backend's array, NaN everywhere but in the contexts."""
        _, _, num_kv_heads, head_dim = self.dense[0].shape
        module = backend_module(backend)
        shape = module.kv_shape(self.num_blocks, self.block_size, num_kv_heads, head_dim)
        kv = np.full(shape, np.nan, np.float32)
        for row, dense in enumerate(self.dense):
            slot = self.slots(row)
            kv[slot // self.block_size, :, :, slot % self.block_size] = dense.swapaxes(0, 1)
        return jnp.asarray(kv).astype(dtype)

    def run(
        self, backend: str, dtype: jnp.dtype, sliding_window: int | None = None
    ) -> NDArray[np.float32]:
        out = jitted_attention(
            jnp.asarray(self.q).astype(dtype),
            self.kv_blocks(backend, dtype),
            jnp.asarray(self.block_table),
            jnp.asarray(self.context_lens),
            jnp.asarray(self.cu_q_lens),
            jnp.int32(self.num_rows),
            scale=self.scale,
            sliding_window=sliding_window,
            backend=backend,
        )
        assert out.dtype == dtype
        return np.asarray(out.astype(jnp.float32))

    def expected(self, dtype: jnp.dtype, sliding_window: int | None = None) -> NDArray[np.float32]:
        """Dense float64 attention of the values as the kernel sees them, rounded to dtype."""
        out = np.zeros(self.q.shape, np.float64)
        for row, dense in enumerate(self.dense):
            first, last = self.cu_q_lens[row], self.cu_q_lens[row + 1]
            q = _rounded(self.q[first:last], dtype)
            k, v = _rounded(dense, dtype)
            group = q.shape[1] // k.shape[1]
            k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
            scores = np.einsum("qnh,cnh->nqc", q, k) * self.scale
            own = (len(k) - len(q) + np.arange(len(q)))[:, None]
            position = np.arange(len(k))[None, :]
            hidden = position > own
            if sliding_window is not None:
                hidden |= own - position >= sliding_window
            scores = np.where(hidden[None], -np.inf, scores)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            out[first:last] = np.einsum("nqc,cnh->qnh", probs, v)
        return out.astype(np.float32)


def _rounded(x: NDArray[np.float32], dtype: jnp.dtype) -> NDArray[np.float64]:
    return np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32)).astype(np.float64)


def make_problem(
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    block_size: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    padding_rows: int = 2,
    padding_tokens: int = 3,
    padding_columns: int = 2,
    seed: int = 0,
) -> Problem:
    """Random rows over a randomly permuted pool with three spare blocks."""
    rng = np.random.default_rng(seed)
    num_rows = len(q_lens)
    needed = [-(-context // block_size) for context in context_lens]
    num_blocks = 1 + sum(needed) + 3
    free = list(rng.permutation(np.arange(1, num_blocks)))
    table = np.zeros((num_rows + padding_rows, max(needed) + padding_columns), np.int32)
    for row, count in enumerate(needed):
        table[row, :count] = [free.pop() for _ in range(count)]
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens), [sum(q_lens)] * padding_rows])
    contexts = np.concatenate([context_lens, [0] * padding_rows])
    num_tokens = sum(q_lens) + padding_tokens

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    return Problem(
        q=normal(num_tokens, num_heads, head_dim),
        dense=[normal(2, context, num_kv_heads, head_dim) for context in context_lens],
        block_table=table,
        context_lens=contexts.astype(np.int32),
        cu_q_lens=cu_q_lens.astype(np.int32),
        num_rows=num_rows,
        num_blocks=num_blocks,
        block_size=block_size,
        scale=head_dim**-0.5,
    )
