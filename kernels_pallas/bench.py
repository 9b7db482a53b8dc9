"""How fast paged attention is on this device: `python -m kernels_pallas.bench`.

Owns: which shapes and peers are run, and the table. Per shape the median of many calls, the least
bytes and products that the answer needs, and their share of what the device copied and multiplied
in the same run. Peers in the same run: contiguous attention, JAX's own ragged kernel (TPU), and our
kernel with one block per request. Ends within its budget; what was not reached says so. Imports no
Hydra, needs no network. Must not know: models, the engine.
"""

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import json_files
from kernels_pallas.ceilings import Ceilings, measure_ceilings
from kernels_pallas.paged_attention import BACKENDS, backend_module, paged_attention
from kernels_pallas.quantised import QUANTISED_DTYPES
from kernels_pallas.shapes import SHAPES, AttentionShape
from kernels_pallas.support import choose
from kernels_pallas.timing import Timing, seconds_per_call

USUAL = (
    "llama-3-8b/decode_64x4k",
    "llama-3-8b/prompts_8x2k",
    "llama-3-8b/mixed_64+512",
    "llama-3-8b/decode_256x1k",
    "llama-3-8b/decode_1x128k",
    "llama-3-8b/decode_1x4k",
    "llama-3-8b/decode_64x4k/block32",
    "llama-3-8b/decode_64x4k/block64",
    "llama-3-8b/decode_64x4k/block128",
    "llama-3-8b/decode_64x4k/int8/block128",
    "llama-3-8b/decode_64x4k/fp8/block128",
    "smollm2-135m/decode_64x4k",
    "qwen2.5-7b/decode_64x4k",
    "mistral-7b/decode_64x4k",
    "llama-3-70b-tp8/decode_64x4k",
    "llama-3-70b-tp8/prompts_8x2k",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel on one shape; `timing` is None where it was not measured, and `note` says why:
    for lack of time, or because it raised.
    """

    shape: str
    kernel: str
    timing: Timing | None
    num_bytes: int
    num_flops: int
    note: str = ""
    has_failed: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a kernel raised, or nothing was measured."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench", description=__doc__)
    parser.add_argument(
        "--backend", choices=BACKENDS, help="default: what kernel=auto chooses here for each shape"
    )
    parser.add_argument("--shapes", default=None, metavar="GLOB", help="of all named shapes")
    parser.add_argument("--small", action="store_true", help="each shape's small form")
    parser.add_argument("--budget-s", type=float, default=280.0, help="start nothing after it")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    given = parser.parse_args(argv)
    names = [n for n in SHAPES if fnmatch.fnmatch(n, given.shapes)] if given.shapes else USUAL
    if not names:
        parser.error(f"no shape matches {given.shapes!r}: they are {list(SHAPES)}")
    if given.json is not None:
        json_files.check_writable("--json", given.json)
    ceilings = measure_ceilings()
    print(headline(ceilings))
    rows: list[Row] = []
    for row in bench(names, backend=given.backend, small=given.small, budget_s=given.budget_s):
        rows.append(row)
        print(line(row, ceilings), flush=True)
        if given.json is not None:
            json_files.write(given.json, report(ceilings, rows))
    faults = faults_of(rows)
    print(f"failed: {'; '.join(faults) or 'none'}")
    return 1 if faults else 0


def faults_of(rows: Sequence[Row]) -> list[str]:
    """What is wrong with a run: every row that raised, or that none has a time."""
    found = [f"{row.shape} {row.kernel}: {row.note}" for row in rows if row.has_failed]
    if not found and not any(row.timing for row in rows):
        found.append("nothing was measured")
    return found


def bench(
    names: Sequence[str], *, backend: str | None, small: bool = False, budget_s: float = 280.0
) -> Iterator[Row]:
    """Every shape with its peers, as they are measured; backend None: what auto chooses for it."""
    started_s = time.perf_counter()
    for name in names:
        shape = host_shape(SHAPES[name].small() if small else SHAPES[name])
        for number, (kernel, prepare) in enumerate(_kernels(shape, backend_for(shape, backend))):
            row = Row(
                shape=name,
                kernel=kernel,
                timing=None,
                num_bytes=shape.kv_bytes,
                num_flops=shape.num_flops,
            )
            if time.perf_counter() - started_s > budget_s:
                yield replace(row, note="not measured: out of time")
                continue
            try:
                timing = seconds_per_call(*prepare())
                yield replace(row, timing=timing)
            except Exception as error:
                note = f"{type(error).__name__}: {str(error)[:200]}"
                is_free = number > 0 and isinstance(error, NotImplementedError)  # a peer may refuse
                yield replace(row, note=note, has_failed=not is_free)


def host_shape(shape: AttentionShape) -> AttentionShape:
    """The shape with the dtype that the default device computes in: a CPU has no fast bfloat16."""
    if jax.default_backend() != "cpu":
        return shape
    kv_dtype = shape.kv_dtype if shape.is_quantised else "float32"
    return replace(shape, dtype="float32", kv_dtype=kv_dtype)


def backend_for(shape: AttentionShape, given: str | None) -> str:
    """The backend that is given, or what `kernel=auto` chooses for this shape here."""
    device = jax.devices()[0]
    return given or choose(device.platform, device.device_kind, shape).backend


type Prepared = tuple[Any, ...]  # a call, its first argument, the fixed ones


def _kernels(shape: AttentionShape, backend: str) -> Iterator[tuple[str, Callable[[], Prepared]]]:
    """Ours, by its backend's name, then its peers."""
    yield f"{backend}, block {shape.block_size}", partial(prepare_ours, shape, backend)
    if shape.is_quantised:
        return
    whole = 128 * -(-max(shape.context_lens) // 128)
    contiguous = replace(shape, block_size=whole, max_model_len=whole)
    yield f"{backend}, a block per request", partial(prepare_ours, contiguous, backend)
    alike = set(zip(shape.q_lens, shape.context_lens, strict=True))
    if len(alike) == 1 and all(q in (1, context) for q, context in alike):  # else not causal
        if jax.default_backend() == "gpu":
            yield "contiguous, cudnn", partial(_dense, shape, "cudnn")
        yield "contiguous, xla", partial(_dense, shape, "xla")
    if jax.default_backend() == "tpu":
        yield "JAX's ragged kernel", partial(_jax_ragged, shape)


def prepare_ours(shape: AttentionShape, backend: str, *, tiles: Any = None) -> Prepared:
    """Our kernel with these tiles (None: its own choice) on a cache whose blocks lie in random
    order, every slot filled; what `seconds_per_call` takes.
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

    return call, _queries(shape), kv_blocks, kv_scales, *map(jnp.asarray, _tables(shape))


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


def _queries(shape: AttentionShape) -> jax.Array:
    dims = (shape.num_tokens, shape.num_heads, shape.head_dim)
    return jax.random.normal(jax.random.key(1), dims, jnp.dtype(shape.dtype))


def _tables(shape: AttentionShape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.int32]:
    ids = np.random.default_rng(0).permutation(np.arange(1, shape.num_blocks)).astype(np.int32)
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


def headline(ceilings: Ceilings) -> str:
    """The device and what it can do at most."""
    return (
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copies "
        f"{ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, multiplies "
        f"{ceilings.matmul_flops_per_s / 1e12:.2f} TFLOP/s in {ceilings.matmul_dtype}"
    )


def report(ceilings: Ceilings, rows: Sequence[Row]) -> dict[str, Any]:
    """A run, or as much of it as there is, as plain data."""
    return {
        "device_kind": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "ceilings": ceilings._asdict(),
        "rows": [asdict(row) | {"timing": row.timing and row.timing._asdict()} for row in rows],
    }


def line(row: Row, ceilings: Ceilings) -> str:
    """As a line of the table."""
    if row.timing is None:
        return f"{row.shape:42} {row.kernel:26} {row.note}"
    seconds = row.timing.median_s
    return (
        f"{row.shape:42} {row.kernel:26} {1e6 * seconds:10.1f} us  "
        f"{row.num_bytes / seconds / 1e9:7.0f} GB/s "
        f"{row.num_bytes / seconds / ceilings.copy_bytes_per_s:6.1%} of copy  "
        f"{row.num_flops / seconds / 1e12:7.2f} TFLOP/s "
        f"{row.num_flops / seconds / ceilings.matmul_flops_per_s:6.1%} of matmul"
    )


if __name__ == "__main__":
    sys.exit(main())
