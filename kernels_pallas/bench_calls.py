"""What a benchmark times on a shape: our kernel, and its peers in the same run.

Owns: the arguments of each call, made on the default device. Peers are contiguous attention, JAX's
own ragged kernel (TPU), and our kernel without the cost of scattered blocks: a block per request,
or consecutive blocks where the backend has none so large. Must not know: how a call is timed, what
is printed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import backend_module, chosen_tiles, paged_attention
from kernels_pallas.quantised import QUANTISED_DTYPES
from kernels_pallas.shapes import AttentionShape
from kernels_pallas.support import why_not

CONSECUTIVE_BLOCK = 128  # the largest that every backend takes

type Prepared = tuple[Any, ...]  # a call, its first argument, the fixed ones


class Entrant(NamedTuple):
    """A kernel that is timed; `backend` is None where it is not ours."""

    kernel: str
    backend: str | None
    shape: AttentionShape
    prepare: Callable[[], Prepared]


def entrants(shape: AttentionShape, backend: str) -> Iterator[Entrant]:
    """Ours, by its backend's name, then its peers."""
    name = f"{backend}, block {shape.block_size}"
    yield Entrant(name, backend, shape, partial(prepare_ours, shape, backend))
    if shape.is_quantised:
        return
    yield _unscattered(shape, backend)
    alike = set(zip(shape.q_lens, shape.context_lens, strict=True))
    if len(alike) == 1 and all(q in (1, context) for q, context in alike):  # else not causal
        if jax.default_backend() == "gpu":
            yield Entrant("contiguous, cudnn", None, shape, partial(_dense, shape, "cudnn"))
        yield Entrant("contiguous, xla", None, shape, partial(_dense, shape, "xla"))
    if jax.default_backend() == "tpu":
        yield Entrant("JAX's ragged kernel", None, shape, partial(_jax_ragged, shape))


def _unscattered(shape: AttentionShape, backend: str) -> Entrant:
    whole = 128 * -(-max(shape.context_lens) // 128)
    single = replace(shape, block_size=whole, max_model_len=whole)
    if why_not(backend, jax.devices()[0].device_kind, single) is None:
        name = f"{backend}, a block per request"
        return Entrant(name, backend, single, partial(prepare_ours, single, backend))
    run = replace(shape, block_size=CONSECUTIVE_BLOCK)
    name = f"{backend}, consecutive blocks of {CONSECUTIVE_BLOCK}"
    return Entrant(name, backend, run, partial(prepare_ours, run, backend, is_consecutive=True))


def prepare_ours(
    shape: AttentionShape, backend: str, *, tiles: Any = None, is_consecutive: bool = False
) -> Prepared:
    """Our kernel with these tiles (None: its own choice) on a cache whose blocks lie in random
    order, or one after the other, every slot filled; what `seconds_per_call` takes.
    """
    layout = backend_module(backend).LAYOUT
    keys = jax.random.split(jax.random.key(0), 3)
    kv_dtype = jnp.dtype(shape.kv_dtype)
    kv_shape = layout.kv_shape(
        shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim
    )
    kv_blocks = jax.random.normal(keys[0], kv_shape, jnp.bfloat16).astype(kv_dtype)
    kv_scales = None
    if kv_dtype in QUANTISED_DTYPES:
        scales_shape = layout.kv_scales_shape(
            shape.num_blocks, shape.block_size, shape.num_kv_heads
        )
        kv_scales = jax.random.uniform(keys[1], scales_shape)
    kind = jax.devices()[0].device_kind

    def call(
        q: jax.Array, kv_blocks: jax.Array, kv_scales: jax.Array | None, *tables: jax.Array
    ) -> jax.Array:
        return paged_attention(
            q, kv_blocks, *tables, scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window, kv_scales=kv_scales, backend=backend,
            device_kind=kind, tiles=tiles,
        )  # fmt: skip

    return (
        call,
        _queries(shape),
        kv_blocks,
        kv_scales,
        *map(jnp.asarray, _tables(shape, is_consecutive=is_consecutive)),
    )


def prepared_shapes(shape: AttentionShape, backend: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, kv_blocks and block_table of that call, as shapes and dtypes."""
    kv_shape = backend_module(backend).LAYOUT.kv_shape(
        shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim
    )
    dims = (shape.num_tokens, shape.num_heads, shape.head_dim)
    return (
        jax.ShapeDtypeStruct(dims, jnp.dtype(shape.dtype)),
        jax.ShapeDtypeStruct(kv_shape, jnp.dtype(shape.kv_dtype)),
        jax.ShapeDtypeStruct((shape.num_rows, shape.blocks_per_row), jnp.int32),
    )


def tiles_of(shape: AttentionShape, backend: str) -> Any:
    """Those with which that call runs where none are given; None: the backend has none."""
    return chosen_tiles(
        *prepared_shapes(shape, backend),
        sliding_window=shape.sliding_window,
        backend=backend,
        device_kind=jax.devices()[0].device_kind,
    )


def _queries(shape: AttentionShape) -> jax.Array:
    dims = (shape.num_tokens, shape.num_heads, shape.head_dim)
    return jax.random.normal(jax.random.key(1), dims, jnp.dtype(shape.dtype))


def _tables(
    shape: AttentionShape, *, is_consecutive: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.int32]:
    ids = np.arange(1, shape.num_blocks, dtype=np.int32)
    if not is_consecutive:
        ids = np.random.default_rng(0).permutation(ids)
    table = np.zeros((shape.num_rows, shape.blocks_per_row), np.int32)
    taken = 0
    for row, context in enumerate(shape.context_lens):
        count = -(-context // shape.block_size)
        table[row, :count] = ids[taken : taken + count]
        taken += count
    return (
        table,
        np.array(shape.context_lens, np.int32),
        np.cumsum([0, *shape.q_lens]).astype(np.int32),
        np.int32(shape.num_rows),
    )


def _dense(shape: AttentionShape, implementation: Literal["cudnn", "xla"]) -> Prepared:
    """The same contexts as one array; all rows are alike, decodes or whole prompts. Decodes get
    their window alone.
    """
    num_rows, q_len, context = shape.num_rows, shape.q_lens[0], shape.context_lens[0]
    if q_len == 1:
        context = min(context, shape.sliding_window or context)
    keys = jax.random.split(jax.random.key(0), 2)
    dims = (num_rows, context, shape.num_kv_heads, shape.head_dim)
    k, v = (jax.random.normal(key, dims, jnp.dtype(shape.dtype)) for key in keys)
    window = None
    if q_len > 1 and shape.sliding_window is not None:
        window = (shape.sliding_window - 1, 0)

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        attended: jax.Array = jax.nn.dot_product_attention(
            q, k, v, scale=shape.head_dim**-0.5, is_causal=q_len > 1,
            local_window_size=window,
            implementation=implementation,
        )  # fmt: skip
        return attended

    q = _queries(shape).reshape(num_rows, q_len, shape.num_heads, shape.head_dim)
    return call, q, k, v


def _jax_ragged(shape: AttentionShape) -> Prepared:
    """`jax.experimental.pallas.ops.tpu.ragged_paged_attention`, for comparison only."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    dims = (shape.num_blocks, shape.block_size, 2 * shape.num_kv_heads, shape.head_dim)
    kv = jax.random.normal(jax.random.key(0), dims, jnp.dtype(shape.dtype))

    def call(
        q: jax.Array,
        kv: jax.Array,
        table: jax.Array,
        context_lens: jax.Array,
        cu_q_lens: jax.Array,
        num_rows: jax.Array,
    ) -> jax.Array:
        return ragged_paged_attention(
            q, kv, context_lens, table, cu_q_lens, num_rows[None],
            sm_scale=shape.head_dim**-0.5, sliding_window=shape.sliding_window,
        )  # fmt: skip

    return call, _queries(shape), kv, *map(jnp.asarray, _tables(shape))
