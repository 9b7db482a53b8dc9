"""Ragged paged attention: its contract, and the choice of a backend by name.

Owns: the signature every backend keeps and the door where arguments are validated. In: the queries
of a step, one layer's KV array, the block table. Out: the attended values. Must not know: what a
request is, how blocks were chosen, the layout of `kv_blocks` (each backend says its own through
`kv_shape`).

A step is rows; a row is the last `q_len` tokens of one sequence's context:

      context_lens[r] = 11, q_len = 3           positions  0 1 2 3 4 5 6 7 8 9 10
                                                           `---- computed ---' `-- this step
      query i of the row sits at position context_lens[r] - q_len + i and sees all positions up to
      its own. Prompt (q_len = context), chunk, decode (q_len = 1) and mixes are the same thing.
"""

import sys
from types import ModuleType
from typing import Any

import jax

from kernels_pallas.hints import NotTheFunction, runs_where_it_can
from kernels_pallas.paged_attention import pallas_gpu, pallas_tpu, reference, xla
from kernels_pallas.paged_attention.validation import check_batch, check_device_kind, validate
from kernels_pallas.tiles import Shaped, measured_tiles, tile_key

__all__ = [
    "BACKENDS", "backend_module", "check_batch", "check_supported", "choose_backend",
    "chosen_tiles", "paged_attention",
]  # fmt: skip

sys.modules[__name__].__class__ = NotTheFunction

_MODULES: dict[str, ModuleType] = {
    "reference": reference,
    "xla": xla,
    "pallas_tpu": pallas_tpu,
    "pallas_gpu": pallas_gpu,
}
BACKENDS: tuple[str, ...] = tuple(_MODULES)


def choose_backend(platform: str) -> str:
    """The backend made for a platform; `support.choose` asks whether it can run a case.

    Args:
        platform: JAX's name of it: cpu, gpu (or cuda, rocm), tpu.
    Raises:
        ValueError: an unknown platform.
    """
    if platform not in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"platform must be cpu, gpu or tpu, got {platform=}")
    return {"tpu": "pallas_tpu", "gpu": "pallas_gpu", "cuda": "pallas_gpu"}.get(platform, "xla")


def backend_module(backend: str) -> ModuleType:
    """The module behind a backend name: it exports `paged_attention`, as `LAYOUT` the module that
    says how its cache lies, in the names of `layout.py`, and `check_supported` where it refuses
    anything.

    Raises:
        ValueError: an unknown name.
    """
    if backend not in _MODULES:
        raise ValueError(f"paged_attention {backend=} is unknown; use one of {BACKENDS}")
    return _MODULES[backend]


def check_supported(q: Shaped, kv_blocks: Shaped, *, backend: str, device_kind: str | None) -> None:
    """Whether a backend runs a call with such queries and cache, from shapes and dtypes alone.

    Raises:
        ValueError: an unknown backend.
        NotImplementedError: it cannot, as the call itself would say when it is traced.
    """
    module = backend_module(backend)
    if hasattr(module, "check_supported"):
        module.check_supported(q, kv_blocks, device_kind=device_kind)


def paged_attention(
    q: jax.Array,
    kv_blocks: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_rows: jax.Array | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: jax.Array | None = None,
    backend: str,
    device_kind: str | None = None,
    tiles: Any = None,
) -> jax.Array:
    """Attention of each row's queries over the row's own context, found through its blocks.

    `write_kv` of this step ran before, so the step's own keys and values are in the blocks.

    Args:
        q: [T, N, H] float32 or bfloat16, rotary applied. Row r owns tokens
            cu_q_lens[r] : cu_q_lens[r + 1]. Query head n reads kv head n // (N / K). T may be 0.
        kv_blocks: one layer's K and V, `kv_shape(P, S, K, H)` of the backend; dtype of q, or a
            quantised one (`kernels_pallas.quantised`) with `kv_scales`. Read only. Block 0 is the
            null block; it and every slot outside the contexts may hold anything, NaN included.
        block_table: [R, M] int32. Position p of row r lies in block block_table[r, p // S] at
            offset p % S. Entries past the context are padding (0).
        context_lens: [R] int32, tokens with valid KV, this step's included, >= q_len. M may be far
            larger than needed: the cost follows the contexts, not M.
        cu_q_lens: [R + 1] int32, cumulated q_lens, starting at 0.
        num_rows: how many of the R rows are real; int or int32 scalar. Rows past it are padding
            (cu_q_lens repeats its last value, context 0, table 0).
        scale: factor on the scores, usually H ** -0.5.
        sliding_window: None, or w >= 1: a query at position p sees only positions > p - w.
        kv_scales: float32, `kv_scales_shape(P, S, K)` of the backend: one factor per token, kv
            head, and K or V, beside the block it belongs to. Given exactly when kv_blocks are
            quantised. Outside the contexts they may hold anything too.
        backend: one of `BACKENDS`.
        device_kind: JAX's name of the device the call is compiled for; chooses tuned tiles. None:
            those that suit any device of the platform. Never looked up here, so that a call
            compiles the same whatever device is present.
        tiles: the backend's `Tiles`, where it has any; None: those measured on this kind of
            device (`kernels_pallas.tiles`), else its own choice from the shapes.
    Returns:
        [T, N, H] in q's dtype; zeros for padding tokens (t >= cu_q_lens[num_rows]). Softmax and
        accumulation are float32.
    Raises:
        ValueError: shapes or dtypes disagree, or an unknown backend; a Pallas backend on a CPU,
            which `kernels_pallas.interpret.interpreted` simulates.
        NotImplementedError: the backend cannot run this case.
    Invariants:
        A row's output depends on its own queries and context only: another row, the padding, the
        permutation of blocks change at most the last bits, and a NaN in one row stays there.
        Within the row a NaN among the values may reach queries that do not see it, later tokens of
        a prompt's step and what lies before a query's window: values are hidden by tile of
        queries, not by query. What no query of the row sees (past the context, before every
        window, the null block) reaches none.
    Source: vLLM (SOSP'23) section 4.3, with the ragged batch of JAX's TPU ragged paged attention.
    """
    module = backend_module(backend)
    validate(
        q, kv_blocks, block_table, context_lens, cu_q_lens, num_rows, scale=scale,
        sliding_window=sliding_window, kv_scales=kv_scales, layout=module.LAYOUT,
    )  # fmt: skip
    check_device_kind(device_kind)
    _check_tiles(tiles, backend)
    if q.shape[0] == 0:
        return q
    if tiles is None:
        tiles = _measured(
            q, kv_blocks, block_table,
            sliding_window=sliding_window, backend=backend, device_kind=device_kind,
        )  # fmt: skip
    with runs_where_it_can(backend):
        out: jax.Array = module.paged_attention(
            q, kv_blocks, block_table, context_lens, cu_q_lens, num_rows,
            scale=scale, sliding_window=sliding_window, kv_scales=kv_scales,
            device_kind=device_kind, tiles=tiles,
        )  # fmt: skip
    return out


def _check_tiles(tiles: Any, backend: str) -> None:
    wanted = getattr(backend_module(backend), "Tiles", None)
    if tiles is None or (wanted is not None and isinstance(tiles, wanted)):
        return
    names = "None" if wanted is None else f"None or {wanted.__module__}.Tiles"
    raise ValueError(f"tiles must be {names} for {backend=}; got {tiles=}")


def chosen_tiles(
    q: Shaped,
    kv_blocks: Shaped,
    block_table: Shaped,
    *,
    sliding_window: int | None,
    backend: str,
    device_kind: str | None,
) -> Any:
    """The `Tiles` with which `paged_attention` runs on a device where none are given; None: the
    backend has none. Arguments as there, or their shapes and dtypes.
    """
    found = _measured(
        q, kv_blocks, block_table,
        sliding_window=sliding_window, backend=backend, device_kind=device_kind,
    )  # fmt: skip
    module = backend_module(backend)
    if found is None and hasattr(module, "default_tiles"):
        found = module.default_tiles(q, kv_blocks, block_table, device_kind=device_kind)
    return found


def _measured(
    q: Shaped,
    kv_blocks: Shaped,
    block_table: Shaped,
    *,
    sliding_window: int | None,
    backend: str,
    device_kind: str | None,
) -> Any:
    """Tiles of the device's table; None: it has none for this call."""
    module = backend_module(backend)
    dims = module.LAYOUT.kv_dims(kv_blocks.shape)
    key = tile_key(
        q, kv_blocks, block_table, num_kv_heads=dims.num_kv_heads, block_size=dims.block_size,
        sliding_window=sliding_window,
    )  # fmt: skip
    fields = measured_tiles(backend, key, num_rows=block_table.shape[0], device_kind=device_kind)
    return None if fields is None else module.Tiles(**fields)
