"""Both validators name the rule and the values; the xla backend never copies the cache."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import (
    BACKENDS,
    backend_module,
    check_batch,
    paged_attention,
    xla,
)
from kernels_pallas.paged_attention.layout import kv_dims, kv_scales_shape, kv_shape
from kernels_pallas.problems import make_problem
from kernels_pallas.write_kv import write_kv

GOOD = {
    "q": jnp.zeros((5, 4, 8)),
    "kv_blocks": jnp.zeros(kv_shape(6, 4, 2, 8)),
    "block_table": jnp.zeros((3, 2), jnp.int32),
    "context_lens": jnp.zeros(3, jnp.int32),
    "cu_q_lens": jnp.zeros(4, jnp.int32),
    "num_rows": 0,
}
INT8_BLOCKS = jnp.zeros(kv_shape(6, 4, 2, 8), jnp.int8)
SCALES = jnp.ones(kv_scales_shape(6, 4, 2))


def test_good_arguments_pass() -> None:
    out = paged_attention(**GOOD, scale=1.0, backend="xla")
    np.testing.assert_array_equal(np.asarray(out), np.zeros((5, 4, 8)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_tokens_is_empty(backend: str) -> None:
    kv = jnp.zeros(backend_module(backend).LAYOUT.kv_shape(6, 16, 2, 64), jnp.bfloat16)
    q = jnp.zeros((0, 4, 64), jnp.bfloat16)
    out = paged_attention(**{**GOOD, "q": q, "kv_blocks": kv}, scale=1.0, backend=backend)
    assert (out.shape, out.dtype) == ((0, 4, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((5, 8))}, r"q must be \[T, N, H\]; got q=\(5, 8\)"),
        ({"q": jnp.zeros((5, 4, 16))}, r"agree on H; got q=\(5, 4, 16\), kv=\(6, 2, 2, 4, 8\)"),
        ({"q": jnp.zeros((5, 3, 8))}, "multiple of K; got num_heads=3, num_kv_heads=2"),
        ({"q": jnp.zeros((5, 4, 8), jnp.bfloat16)}, "dtype=bfloat16, kv_blocks=float32"),
        ({"q": jnp.zeros((5, 4, 8), jnp.int8)}, "q must be float32 or bfloat16; got q=int8"),
        ({"kv_blocks": INT8_BLOCKS}, "or be quantised and come with kv_scales"),
        ({"kv_scales": SCALES}, r"kv_scales belong to kv_blocks of \['int8', 'float8_e4m3fn'\]"),
        (
            {"kv_blocks": INT8_BLOCKS, "kv_scales": SCALES[:, :, :, :3]},
            r"float32 of shape \(6, 2, 2, 4\) for these kv_blocks; got kv_scales=\(6, 2, 2, 3\)",
        ),
        (
            {"kv_blocks": INT8_BLOCKS, "kv_scales": SCALES.astype(jnp.bfloat16)},
            "kv_scales must be float32 .*dtype=bfloat16",
        ),
        ({"kv_blocks": jnp.zeros((6, 4, 2, 8))}, r"\[P, 2, K, S, H\], got shape=\(6, 4, 2, 8\)"),
        ({"kv_blocks": jnp.zeros((6, 1, 2, 4, 8))}, r"shape=\(6, 1, 2, 4, 8\)"),
        ({"block_table": jnp.zeros(3, jnp.int32)}, r"\[R, M\]; got block_table=\(3,\)"),
        ({"context_lens": jnp.zeros(4, jnp.int32)}, r"context_lens=\(4,\), cu_q_lens=\(4,\)"),
        ({"cu_q_lens": jnp.zeros(3, jnp.int32)}, r"cu_q_lens=\(3,\)"),
        ({"block_table": jnp.zeros((3, 2))}, "block_table must be int32; got dtype=float32"),
        ({"num_rows": 4}, "num_rows=4, R=3"),
        ({"num_rows": jnp.zeros(1, jnp.int32)}, r"scalar; got num_rows=\(1,\)"),
        ({"num_rows": jnp.int8(2)}, "num_rows must be an int or int32; got num_rows=2"),
        ({"num_rows": 2.0}, "num_rows must be an int or int32; got num_rows=2.0"),
        ({"num_rows": True}, "num_rows must be an int or int32; got num_rows=True"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"sliding_window": 2.5}, "None or an integer >= 1; got sliding_window=2.5"),
        ({"sliding_window": True}, "None or an integer >= 1; got sliding_window=True"),
        ({"scale": float("inf")}, "scale=inf"),
        ({"scale": "x"}, "scale must be a finite number; got scale=x"),
        ({"tiles": 3}, r"tiles must be None or kernels_pallas\.paged_attention\.xla\.Tiles"),
        ({"tiles": 3}, "for backend='xla'; got tiles=3"),
        ({"tiles": xla.Tiles(), "backend": "reference"}, "must be None for backend='reference'"),
        ({"device_kind": 3}, "device_kind must be None or what .*; got device_kind=3"),
        (
            {"kv_blocks": (GOOD["kv_blocks"], None)},
            "kv_blocks must be an array; got a tuple: write_kv returns kv_blocks and kv_scales",
        ),
        ({"context_lens": [0, 0, 0]}, "context_lens must be an array; got a list"),
        ({"backend": "fast"}, r"backend='fast' is unknown; use one of \('reference', 'xla'"),
    ],
)
def test_wrong_arguments(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**GOOD, "scale": 1.0, "backend": "xla", **change})


def test_a_package_that_is_called_says_what_to_import() -> None:
    for name in ("paged_attention", "write_kv"):
        package = importlib.import_module(f"kernels_pallas.{name}")
        with pytest.raises(TypeError, match=rf"`from kernels_pallas\.{name} import {name}`"):
            package(**GOOD)


@pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_gpu"])
def test_a_pallas_kernel_on_a_cpu_says_how_it_is_simulated(backend: str) -> None:
    problem = make_problem((1, 2), (5, 7), head_dim=128, dtype="bfloat16")
    kv_blocks, q = problem.kv_blocks(backend), jnp.asarray(problem.q).astype(jnp.bfloat16)
    rows = [problem.block_table, problem.context_lens, problem.cu_q_lens]
    message = rf"backend='{backend}' does not run on a CPU; .*interpreted\('{backend}'\)"
    with pytest.raises(ValueError, match=message):
        paged_attention(q, kv_blocks, *map(jnp.asarray, rows), 2, scale=1.0, backend=backend)
    with pytest.raises(ValueError, match=message):
        write_kv(kv_blocks, q[:, :2], q[:, :2], jnp.arange(len(q)), backend=backend)


def test_kv_dims_inverts_kv_shape() -> None:
    assert tuple(kv_dims(kv_shape(7, 3, 2, 8))) == (7, 3, 2, 8)


def _batch(**changes: object) -> dict[str, object]:
    problem = make_problem((1, 3), (9, 3), block_size=4, padding_rows=1, padding_tokens=2)
    num_slots = problem.num_blocks * problem.block_size
    slots = np.concatenate([problem.slots(0)[-1:], problem.slots(1)[-3:], [num_slots] * 2])
    batch: dict[str, object] = {
        "block_table": problem.block_table.copy(),
        "context_lens": problem.context_lens.copy(),
        "cu_q_lens": problem.cu_q_lens.copy(),
        "num_rows": 2,
        "num_tokens": 6,
        "num_blocks": problem.num_blocks,
        "block_size": problem.block_size,
        "slots": slots.astype(np.int32),
    }
    for name, change in changes.items():
        if isinstance(change, dict):
            for index, value in change.items():
                batch[name][index] = value
        else:
            batch[name] = change
    return batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rows": 4}, "num_rows=4, R=3"),
        ({"cu_q_lens": {1: 5}}, r"never fall; got cu_q_lens=\[0, 5, 4, 4\]"),
        ({"num_tokens": 3}, "last=4, num_tokens=3"),
        ({"cu_q_lens": {1: 0}}, "row=0, q_len=0"),
        ({"context_lens": {1: 2}}, "row=1, context=2, q_len=3"),
        ({"context_lens": {0: 99}}, "row=0, context=99, blocks_per_row=5, block_size=4"),
        ({"block_table": {(0, 1): 0}}, "row=0, block_ids="),
        ({"num_blocks": 2}, "num_blocks=2"),
        ({"context_lens": {2: 1}}, "row=2, cu_q_len=4, context=1"),
        ({"slots": {1: 0}}, "row=1, slots="),
        ({"slots": {5: 3}}, r"slots=\[32, 3\], num_slots=32"),
    ],
)
def test_check_batch_names_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_batch(**_batch(**changes))


def test_check_batch_sees_a_block_used_twice_and_a_slot_written_twice() -> None:
    batch = _batch()
    table = batch["block_table"]
    with pytest.raises(ValueError, match="must not use a block twice"):
        check_batch(**_batch(block_table={(0, 1): table[0, 0]}))
    # Two rows that read the same block may not both write its slot.
    shared = make_problem((1, 1), (3, 3), block_size=4, padding_rows=0)
    shared.block_table[1, 0] = shared.block_table[0, 0]
    with pytest.raises(ValueError, match="no two real tokens"):
        check_batch(
            block_table=shared.block_table, context_lens=shared.context_lens,
            cu_q_lens=shared.cu_q_lens, num_rows=2, num_tokens=2, num_blocks=shared.num_blocks,
            block_size=4, slots=np.concatenate([shared.slots(0)[-1:], shared.slots(1)[-1:]]),
        )  # fmt: skip


def test_check_batch_accepts_what_make_problem_makes() -> None:
    assert check_batch(**_batch()) is None


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
def test_xla_rounds_no_operand_on_an_accelerator(platform: str, kv_dtype: jnp.dtype) -> None:
    """By default a TPU multiplies float32 as bfloat16, and a GPU as TF32."""
    problem = make_problem((1, 9), (40, 30), kv_dtype=kv_dtype)
    arrays = (problem.q, problem.kv_blocks("xla"), problem.block_table, problem.context_lens)
    scales = problem.kv_scales("xla")

    def call(*args: jax.Array) -> jax.Array:
        return paged_attention(*args, 2, scale=1.0, kv_scales=scales, backend="xla")

    traced = jax.jit(call).trace(*arrays, problem.cu_q_lens)
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    dots = [line for line in lines if "dot_general" in line]
    assert len(dots) >= 8
    assert [dot for dot in dots if "precision = [HIGHEST, HIGHEST]" not in dot] == []


def test_xla_reads_the_cache_in_place() -> None:
    """Temporary memory follows the tuning constants, not the pool: nothing copies kv_blocks."""
    num_blocks = 4096
    kv = jax.ShapeDtypeStruct(kv_shape(num_blocks, 16, 2, 64), jnp.float32)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 512), (8,), (9,), ())]
    q = jax.ShapeDtypeStruct((128, 4, 64), jnp.float32)

    def call(*args: jax.Array) -> jax.Array:
        return paged_attention(*args, scale=1.0, backend="xla")

    memory = jax.jit(call).lower(q, kv, *ints).compile().memory_analysis()
    kv_bytes = num_blocks * 2 * 2 * 16 * 64 * 4
    assert 0 < memory.temp_size_in_bytes < kv_bytes / 4
