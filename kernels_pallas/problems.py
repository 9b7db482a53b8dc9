"""Ragged attention problems with their answers: what every backend is checked against.

Owns: random rows over a permuted, poisoned pool, and dense attention in numpy float64. The cache
holds NaN in block 0 and in every slot outside the contexts, so whoever reads what it should not
gets no finite answer. Shares no arithmetic with any backend. In: lengths and sizes. Out: `Problem`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from kernels_pallas.paged_attention import backend_module, paged_attention
from kernels_pallas.quantised import QUANTISED_DTYPES, largest

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One ragged attention problem.

    `q` and `dense` hold float32 numbers that `dtype` represents exactly; a quantised cache is given
    by `stored` numbers and their `scales`, and `dense` is their product.
    """

    q: NDArray[np.float32]  # [T, N, H]
    dense: list[NDArray[np.float32]]  # per row [2, context, K, H]
    stored: list[NDArray[np.float32]]  # likewise; equals dense where nothing is quantised
    scales: list[NDArray[np.float32]] | None  # per row [2, context, K]
    block_table: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    cu_q_lens: NDArray[np.int32]
    num_rows: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    scale: float
    sliding_window: int | None
    dtype: jnp.dtype
    kv_dtype: jnp.dtype

    def slots(self, row: int) -> NDArray[np.int32]:
        """Where a row's context lies."""
        position = np.arange(self.context_lens[row])
        block = self.block_table[row, position // self.block_size]
        return (block * self.block_size + position % self.block_size).astype(np.int32)

    def kv_blocks(self, backend: str) -> jax.Array:
        """The backend's array; NaN outside the contexts (int8 has none: there its scales do)."""
        shape = (self.num_blocks, 2, self.num_kv_heads, self.block_size, self.q.shape[-1])
        empty = 77.0 if self.kv_dtype == jnp.int8 else np.nan
        plain = self._filled(np.full(shape, empty, np.float32), self.stored)
        return backend_module(backend).LAYOUT.lay_kv(jnp.asarray(plain).astype(self.kv_dtype))

    def kv_scales(self, backend: str) -> jax.Array | None:
        """The backend's array of scales, NaN outside the contexts."""
        if self.scales is None:
            return None
        shape = (self.num_blocks, 2, self.num_kv_heads, self.block_size)
        plain = self._filled(np.full(shape, np.nan, np.float32), self.scales)
        return backend_module(backend).LAYOUT.lay_scales(jnp.asarray(plain))

    def _filled(self, plain: Floats, rows: list[NDArray[np.float32]]) -> Floats:
        for row, values in enumerate(rows):
            slot = self.slots(row)
            plain[slot // self.block_size, :, :, slot % self.block_size] = values.swapaxes(0, 1)
        return plain

    def run(
        self,
        backend: str,
        *,
        device_kind: str | None = None,
        tiles: Any = None,
        kv_blocks: jax.Array | None = None,
        block_table: jax.Array | None = None,
    ) -> NDArray[np.float32]:
        """What the backend answers, as float32, with its own tiles for this kind of device and the
        problem's own arrays unless others are given.
        """
        out = _attention(
            jnp.asarray(self.q).astype(self.dtype),
            self.kv_blocks(backend) if kv_blocks is None else kv_blocks,
            jnp.asarray(self.block_table) if block_table is None else block_table,
            jnp.asarray(self.context_lens),
            jnp.asarray(self.cu_q_lens),
            jnp.int32(self.num_rows),
            tiles=tiles,
            kv_scales=self.kv_scales(backend),
            scale=self.scale,
            sliding_window=self.sliding_window,
            backend=backend,
            device_kind=device_kind,
        )
        if out.dtype != self.dtype:
            raise AssertionError(f"{backend} answers in {out.dtype} to q in {self.dtype}")
        return np.asarray(out.astype(jnp.float32))

    def expected(self) -> NDArray[np.float32]:
        """Dense float64 attention of the same numbers; padding is zero."""
        out = np.zeros(self.q.shape, np.float64)
        for row, dense in enumerate(self.dense):
            first, last = self.cu_q_lens[row], self.cu_q_lens[row + 1]
            q, (k, v) = self.q[first:last].astype(np.float64), dense.astype(np.float64)
            group = q.shape[1] // k.shape[1]
            k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
            scores = np.einsum("qnh,cnh->nqc", q, k, optimize=True) * self.scale
            own = (len(k) - len(q) + np.arange(len(q)))[:, None]
            position = np.arange(len(k))[None, :]
            hidden = position > own
            if self.sliding_window is not None:
                hidden |= own - position >= self.sliding_window
            scores = np.where(hidden[None], -np.inf, scores)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            out[first:last] = np.einsum("nqc,cnh->qnh", probs, v, optimize=True)
        return out.astype(np.float32)

    def error(self, backend: str, *, device_kind: str | None = None, tiles: Any = None) -> float:
        """`error_of` what the backend answers."""
        return self.error_of(self.run(backend, device_kind=device_kind, tiles=tiles))

    def error_of(self, got: NDArray[np.float32]) -> float:
        """Largest relative error |got - expected| / |expected| of any token and head, as norms over
        H; infinite where padding is not zero or a number is not finite.
        """
        expected = self.expected()
        num_real = int(self.cu_q_lens[self.num_rows])
        if np.any(got[num_real:] != 0.0) or not np.all(np.isfinite(got)):
            return float("inf")
        if num_real == 0:
            return 0.0
        difference = np.linalg.norm(got[:num_real] - expected[:num_real], axis=-1)
        return float(np.max(difference / np.linalg.norm(expected[:num_real], axis=-1)))


# One jitted function for all: problems of equal shapes share a compile.
_attention = jax.jit(
    paged_attention, static_argnames=("scale", "sliding_window", "backend", "device_kind", "tiles")
)


def make_problem(
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    scale: float | None = None,
    sliding_window: int | None = None,
    query_magnitude: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    kv_dtype: DTypeLike | None = None,
    table: str = "permuted",
    padding_rows: int = 2,
    padding_tokens: int = 3,
    padding_columns: int = 2,
    spare_blocks: int = 3,
    seed: int = 0,
) -> Problem:
    """Random rows.

    Args:
        q_lens, context_lens: per row, 1 <= q_len <= context_len.
        scale: None: head_dim ** -0.5.
        query_magnitude: standard deviation of the queries; where it is large, so are the scores,
            and few tokens take all of the softmax.
        kv_dtype: None: that of q.
        table: permuted; consecutive: each row one run of blocks; shared: rows of equal blocks up to
            the last, as prefix caching leaves them (their own tokens still differ).
        padding_rows, padding_tokens, padding_columns: what the arrays hold beyond the problem.
        spare_blocks: that no row uses.
    """
    rng = np.random.default_rng(seed)
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(dtype if kv_dtype is None else kv_dtype)
    num_rows = len(q_lens)
    needed = [-(-context // block_size) for context in context_lens]
    num_shared = _num_shared(q_lens, context_lens, block_size) if table == "shared" else 0
    num_blocks = 1 + sum(needed) - num_shared * max(0, num_rows - 1) + spare_blocks
    ids = np.arange(1, num_blocks)
    free = list(ids if table == "consecutive" else rng.permutation(ids))
    shared = [free.pop(0) for _ in range(num_shared)]
    blocks = np.zeros((num_rows + padding_rows, max(needed, default=0) + padding_columns), np.int32)
    for row, count in enumerate(needed):
        blocks[row, :count] = shared + [free.pop(0) for _ in range(count - num_shared)]

    def normal(*shape: int, magnitude: float = 1.0) -> NDArray[np.float32]:
        return _exact(magnitude * rng.standard_normal(shape).astype(np.float32), dtype)

    num_tokens = sum(q_lens) + padding_tokens
    q = normal(num_tokens, num_heads, head_dim, magnitude=query_magnitude)
    dense = [normal(2, context, num_kv_heads, head_dim) for context in context_lens]
    for other in dense[1:]:
        other[:, : num_shared * block_size] = dense[0][:, : num_shared * block_size]
    stored, scales = dense, None
    if kv_dtype in QUANTISED_DTYPES:
        pairs = [_quantised(rows, kv_dtype) for rows in dense]
        stored, scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        dense = [s * factor[..., None] for s, factor in pairs]
    return Problem(
        q=q,
        dense=dense,
        stored=stored,
        scales=scales,
        block_table=blocks,
        context_lens=np.array([*context_lens, *[0] * padding_rows], np.int32),
        cu_q_lens=np.cumsum([0, *q_lens, *[0] * padding_rows]).astype(np.int32),
        num_rows=num_rows,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        scale=head_dim**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def _num_shared(q_lens: Sequence[int], context_lens: Sequence[int], block_size: int) -> int:
    """Whole blocks that every row has computed before this step."""
    computed = [c - q for q, c in zip(q_lens, context_lens, strict=True)]
    return min(computed, default=0) // block_size


def _exact(x: Floats, dtype: jnp.dtype) -> NDArray[np.float32]:
    exact: NDArray[np.float32] = x.astype(dtype).astype(np.float32)
    return exact


def _quantised(
    x: NDArray[np.float32], dtype: jnp.dtype
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Numbers as a cache would store them, and their factors."""
    scales = _exact(np.abs(x).max(-1) / largest(dtype), jnp.dtype(jnp.bfloat16))
    scaled = np.clip(x / scales[..., None], -largest(dtype), largest(dtype))
    stored = np.rint(scaled) if dtype == jnp.int8 else scaled
    return _exact(stored, dtype), scales
