"""The two validators of a paged_attention call: what shapes can tell, and what values can tell.

`validate` looks at shapes and dtypes, so it runs while tracing and costs nothing per step.
`check_batch` looks at values on the host (numpy), for tests and debugging: inside a compiled step a
wrong block id is clamped silently. Errors print names and values. Must not know: any backend.
"""

from numbers import Real
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kernels_pallas.paged_attention.layout import KvDims
from kernels_pallas.quantised import QUANTISED_DTYPES

SUPPORTED_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


class Layout(Protocol):
    """The part of a backend module that says how its cache lies."""

    def kv_dims(self, shape: tuple[int, ...]) -> KvDims:
        """The counts behind the shape of one layer's KV array."""

    def kv_scales_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int
    ) -> tuple[int, ...]:
        """Shape of one layer's scales."""


def _require(holds: bool, rule: str, **values: object) -> None:
    if not holds:
        raise ValueError(f"{rule}; got " + ", ".join(f"{k}={v}" for k, v in values.items()))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_arrays(**arrays: object) -> None:
    """Each is an array, or None.

    Raises:
        ValueError: one is not.
    """
    for name, array in arrays.items():
        if array is None or (hasattr(array, "shape") and hasattr(array, "dtype")):
            continue
        told = ": write_kv returns kv_blocks and kv_scales" if isinstance(array, tuple) else ""
        raise ValueError(f"{name} must be an array; got a {type(array).__name__}{told}")


def check_device_kind(device_kind: object) -> None:
    """It is a name, or None.

    Raises:
        ValueError: it is not.
    """
    _require(
        device_kind is None or isinstance(device_kind, str),
        "device_kind must be None or what a jax.Device calls itself in its device_kind",
        device_kind=device_kind,
    )


def validate(
    q: jax.Array,
    kv_blocks: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_rows: jax.Array | int,
    *,
    scale: float,
    sliding_window: int | None,
    kv_scales: jax.Array | None,
    layout: Layout,
) -> None:
    """Static checks of `paged_attention`'s arguments; `layout` is the backend's.

    Raises:
        ValueError: with the rule broken and the shapes or dtypes that break it.
    """
    check_arrays(
        q=q, kv_blocks=kv_blocks, block_table=block_table, context_lens=context_lens,
        cu_q_lens=cu_q_lens, kv_scales=kv_scales,
    )  # fmt: skip
    _require(q.ndim == 3, "q must be [T, N, H]", q=q.shape)
    dims = layout.kv_dims(kv_blocks.shape)
    _, num_heads, head_dim = q.shape
    _require(
        head_dim == dims.head_dim, "q and kv_blocks must agree on H", q=q.shape, kv=kv_blocks.shape
    )
    _require(dims.num_blocks >= 1 and dims.block_size >= 1, "P and S must be >= 1", dims=dims)
    _require(
        dims.num_kv_heads >= 1 and num_heads % dims.num_kv_heads == 0,
        "N must be a multiple of K",
        num_heads=num_heads,
        num_kv_heads=dims.num_kv_heads,
    )
    _require(q.dtype in SUPPORTED_DTYPES, "q must be float32 or bfloat16", q=q.dtype)
    check_kv_dtype(q.dtype, kv_blocks, kv_scales, layout=layout)
    _require(block_table.ndim == 2, "block_table must be [R, M]", block_table=block_table.shape)
    max_rows = block_table.shape[0]
    _require(
        max_rows >= 1 and block_table.shape[1] >= 1,
        "R and M must be >= 1",
        block_table=block_table.shape,
    )
    _require(
        context_lens.shape == (max_rows,) and cu_q_lens.shape == (max_rows + 1,),
        "context_lens must be [R] and cu_q_lens [R + 1] for block_table [R, M]",
        block_table=block_table.shape,
        context_lens=context_lens.shape,
        cu_q_lens=cu_q_lens.shape,
    )
    for name, array in (
        ("block_table", block_table),
        ("context_lens", context_lens),
        ("cu_q_lens", cu_q_lens),
    ):
        _require(array.dtype == jnp.int32, f"{name} must be int32", dtype=array.dtype)
    _require(np.shape(num_rows) == (), "num_rows must be a scalar", num_rows=np.shape(num_rows))
    _require(
        _is_integer(num_rows) or getattr(num_rows, "dtype", None) == jnp.int32,
        "num_rows must be an int or int32",
        num_rows=num_rows,
    )
    if isinstance(num_rows, int):
        _require(
            0 <= num_rows <= max_rows, "num_rows must be in 0..R", num_rows=num_rows, R=max_rows
        )
    _require(
        sliding_window is None or (_is_integer(sliding_window) and sliding_window >= 1),
        "sliding_window must be None or an integer >= 1",
        sliding_window=sliding_window,
    )
    is_number = isinstance(scale, Real | np.generic | jax.Array)
    _require(is_number and bool(np.isfinite(scale)), "scale must be a finite number", scale=scale)


def check_kv_dtype(
    dtype: jnp.dtype, kv_blocks: jax.Array, kv_scales: jax.Array | None, *, layout: Layout
) -> None:
    """The cache has the dtype of what is read or written with it, or a quantised one with scales.

    Raises:
        ValueError: another dtype, scales without need, none where needed, or of another shape.
    """
    if kv_scales is None:
        _require(
            kv_blocks.dtype == dtype,
            "kv_blocks must have the dtype of q, k and v, or be quantised and come with kv_scales",
            dtype=dtype,
            kv_blocks=kv_blocks.dtype,
        )
        return
    num_blocks, block_size, num_kv_heads, _ = layout.kv_dims(kv_blocks.shape)
    _require(
        kv_blocks.dtype in QUANTISED_DTYPES,
        f"kv_scales belong to kv_blocks of {[d.name for d in QUANTISED_DTYPES]}",
        kv_blocks=kv_blocks.dtype,
    )
    expected = layout.kv_scales_shape(num_blocks, block_size, num_kv_heads)
    _require(
        kv_scales.shape == expected and kv_scales.dtype == jnp.float32,
        f"kv_scales must be float32 of shape {expected} for these kv_blocks",
        kv_scales=kv_scales.shape,
        dtype=kv_scales.dtype,
        kv_blocks=kv_blocks.shape,
    )


def check_batch(
    *,
    block_table: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    cu_q_lens: NDArray[np.int32],
    num_rows: int,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    slots: NDArray[np.int32] | None = None,
) -> None:
    """Host-side checks of a batch's values, the ones a compiled step cannot make.

    Args:
        block_table: [R, M].
        context_lens: [R].
        cu_q_lens: [R + 1].
        num_rows: real rows.
        num_tokens: T, the padded tokens of the step.
        num_blocks: P, the null block included.
        block_size: S.
        slots: [T] what `write_kv` gets, if the writes are to be checked too.
    Raises:
        ValueError: the first rule broken, with the row and its values.
    """
    max_rows, max_blocks = block_table.shape
    _require(0 <= num_rows <= max_rows, "num_rows must be in 0..R", num_rows=num_rows, R=max_rows)
    _require(
        cu_q_lens[0] == 0 and bool(np.all(np.diff(cu_q_lens) >= 0)),
        "cu_q_lens must start at 0 and never fall",
        cu_q_lens=cu_q_lens.tolist(),
    )
    _require(
        cu_q_lens[num_rows] <= num_tokens,
        "the rows must fit the step's tokens",
        last=int(cu_q_lens[num_rows]),
        num_tokens=num_tokens,
    )
    for row in range(num_rows):
        q_len = int(cu_q_lens[row + 1] - cu_q_lens[row])
        context = int(context_lens[row])
        _require(q_len >= 1, "a real row must have q_len >= 1", row=row, q_len=q_len)
        _require(
            context >= q_len, "context_len must be >= q_len", row=row, context=context, q_len=q_len
        )
        _require(
            context <= max_blocks * block_size,
            "block_table must cover the context",
            row=row,
            context=context,
            blocks_per_row=max_blocks,
            block_size=block_size,
        )
        used = block_table[row, : -(-context // block_size)]
        _require(
            bool(np.all((used >= 1) & (used < num_blocks))),
            "block ids of a context must be in 1..P-1 (0 is the null block)",
            row=row,
            block_ids=used.tolist(),
            num_blocks=num_blocks,
        )
        _require(
            len(np.unique(used)) == len(used),
            "a row must not use a block twice",
            row=row,
            block_ids=used.tolist(),
        )
    for row in range(num_rows, max_rows):
        _require(
            cu_q_lens[row + 1] == cu_q_lens[num_rows]
            and context_lens[row] == 0
            and not np.any(block_table[row]),
            "a padding row must repeat cu_q_lens and hold context 0 and table 0",
            row=row,
            cu_q_len=int(cu_q_lens[row + 1]),
            context=int(context_lens[row]),
        )
    if slots is not None:
        _check_slots(slots, block_table, context_lens, cu_q_lens, num_rows, num_blocks, block_size)


def _check_slots(
    slots: NDArray[np.int32],
    block_table: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    cu_q_lens: NDArray[np.int32],
    num_rows: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Every real token writes where its position will be read; padding is dropped, and so is the
    only token of a row whose KV is in its slot already.
    """
    num_slots = num_blocks * block_size
    num_real = int(cu_q_lens[num_rows])
    for row in range(num_rows):
        first, last = int(cu_q_lens[row]), int(cu_q_lens[row + 1])
        if last - first == 1 and slots[first] >= num_slots:
            continue
        positions = int(context_lens[row]) - (last - first) + np.arange(last - first)
        expected = block_table[row, positions // block_size] * block_size + positions % block_size
        _require(
            np.array_equal(slots[first:last], expected),
            "slots must be the ones the row's table reads back",
            row=row,
            slots=slots[first:last].tolist(),
            expected=expected.tolist(),
        )
    written = slots[:num_real][slots[:num_real] < num_slots]
    _require(
        len(np.unique(written)) == len(written),
        "no two real tokens may write one slot",
        slots=written.tolist(),
    )
    _require(
        bool(np.all(slots[num_real:] >= num_slots)),
        "padding tokens must write to a slot >= num_slots, which is dropped",
        slots=slots[num_real:].tolist(),
        num_slots=num_slots,
    )
