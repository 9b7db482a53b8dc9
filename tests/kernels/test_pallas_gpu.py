"""The Hopper kernels, interpreted on the CPU, races looked for: numbers, isolation, refusals.

A few programs share every batch, so that units are cut and combined. What the simulator cannot
show, a missing wait for wgmma, is kept to one function of the kernel.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixed_shapes import ALL_CACHES, FEW_CACHES, Cache, FixedShapes, drawn
from hidden_values import check_hidden_values
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas import compile_targets, support
from kernels_pallas.cases import PADDING, ROWS, case
from kernels_pallas.interpret import interpreted
from kernels_pallas.paged_attention import gpu_layout, pallas_gpu
from kernels_pallas.paged_attention.gpu_producer import Loads, segment_at
from kernels_pallas.paged_attention.gpu_units import (
    CONTEXT,
    FIRST_RUN,
    NUM_TILES,
    ROW,
    START,
    plan,
    single_queries,
    tiles_of_queries,
)
from kernels_pallas.paged_attention.layout import KvDims
from kernels_pallas.paged_attention.pallas_gpu import Tiles, decode_geometry, prompt_geometry
from kernels_pallas.problems import Problem, make_problem
from kernels_pallas.shapes import SHAPES
from kernels_pallas.tolerances import tolerance
from kernels_pallas.write_kv import pallas_gpu as write_module
from kernels_pallas.write_kv import write_kv

BF16, INT8, FP8 = jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn
THREE = Tiles(num_programs=3)
ONE = Tiles(num_programs=1, decode_columns=64, prompt_columns=128, prompt_consumers=1)
FIVE = Tiles(num_programs=5, max_stages=2)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted("pallas_gpu", detect_races=True):
        yield


def check(problem: Problem, tiles: Tiles) -> None:
    assert problem.error("pallas_gpu", tiles=tiles) <= tolerance(problem.dtype)


MQA = {"num_heads": 7, "num_kv_heads": 1, "head_dim": 128}
MHA = {"num_heads": 4, "num_kv_heads": 4}


# With the batches drawn below: every group, head_dim, block size, padding and kind of tiles once.
# The rest is slow.
@pytest.mark.parametrize(
    ("name", "tiles", "options"),
    [
        ("mixed", ONE, {**MQA, "block_size": 128, "sliding_window": 50}),
        ("peaky", THREE, {"scale": -0.1, "num_heads": 9, "num_kv_heads": 3}),
        # One token, and a block cut into runs.
        ("one_row", THREE, {"padding": "none", "scale": 0.0, "block_size": 256}),
        ("skewed", FIVE, {**MHA, "padding": "none", "block_size": 64}),
    ],
)
def test_rows(name: str, tiles: Tiles, options: dict[str, object]) -> None:
    check(case(name, dtype=BF16, **options), tiles)


def test_quantised_and_every_stage_is_filled_again() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "padding_tokens": 0}
    check(make_problem((40, 1), (500, 20), kv_dtype=INT8, dtype=BF16, **sizes), THREE)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ROWS)
def test_all_rows(name: str, padding: str, group: int, head_dim: int) -> None:
    sizes = {"num_heads": 2 * group, "head_dim": head_dim, "dtype": BF16}
    check(case(name, padding=padding, **sizes), (THREE, ONE, FIVE)[group % 3])


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, INT8, FP8], ids=["plain", "int8", "fp8"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("sliding_window", [None, 1, 33, 200])
@pytest.mark.parametrize("table", ["permuted", "shared"])
@pytest.mark.parametrize("name", ["chunks", "mixed", "skewed"])
def test_all_caches(
    name: str, table: str, sliding_window: int | None, block_size: int, kv_dtype: jnp.dtype
) -> None:
    sizes = {"sliding_window": sliding_window, "block_size": block_size, "kv_dtype": kv_dtype}
    check(case(name, table=table, dtype=BF16, **sizes), THREE)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [((1,), (33_000,)), ((20, 1), (32_900, 40))])
def test_context_past_32k(rows: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "block_size": 128, "dtype": BF16}
    check(make_problem(*rows, padding_tokens=0, **sizes), FIVE)


# Batches of the same shapes.
FIXED = FixedShapes(
    backend="pallas_gpu", tiles=THREE, num_rows=4, num_tokens=70,
    sizes={"num_heads": 6, "num_kv_heads": 2, "dtype": BF16},
)  # fmt: skip


@drawn(2)
@given(st.data())
@pytest.mark.parametrize(
    "cache", [cache for cache in FEW_CACHES if cache.block_size < 128], ids=str
)
def test_drawn_batches(cache: Cache, data: st.DataObject) -> None:
    problem = data.draw(FIXED.batches(60, [cache]))
    assert FIXED.error(problem) <= tolerance(problem.dtype)


def test_a_step_of_padding_is_zero() -> None:
    assert FIXED.error(FIXED.problem((), (), seed=0)) == 0


@pytest.mark.slow
@drawn(60)
@given(FIXED.batches(60, ALL_CACHES))
def test_many_drawn_batches(problem: Problem) -> None:
    assert FIXED.error(problem) <= tolerance(problem.dtype)


def test_nan_stays_in_its_row() -> None:
    """One request whose values overflowed must not spoil its neighbours in tiles and parts."""
    problem = FIXED.problem((1, 19, 1, 3), (9, 40, 150, 70), seed=0)
    clean = FIXED.answer(problem)
    for spoiled in (0, 1):
        values = problem.stored[spoiled][1]
        sound, values[8, 0, 0] = values[8, 0, 0], np.nan
        got = FIXED.answer(problem)
        values[8, 0, 0] = sound
        first, last = problem.cu_q_lens[spoiled : spoiled + 2]
        assert np.isnan(got[first:last, 0, 0]).all(), "a NaN in the context must be seen"
        others = np.r_[0:first, last : len(got)]
        np.testing.assert_array_equal(got[others], clean[others])


def test_hidden_values_may_be_nan() -> None:
    check_hidden_values(lambda problem: problem.run("pallas_gpu", tiles=THREE), dtype=BF16)


def test_only_blocks_that_are_seen_are_read() -> None:
    """Not past the context, not before the window; the simulator reads zeros outside the pool, as
    the device does, so the copies themselves are looked at.
    """
    q_lens, context_lens, window = (1, 18, 1), (300, 200, 30), 50
    problem = FIXED.problem(q_lens, context_lens, seed=3)
    dims = KvDims(problem.num_blocks, 16, 2, 64)
    table, contexts, cu_q_lens = map(
        jnp.asarray, (problem.block_table, problem.context_lens, problem.cu_q_lens)
    )
    num_tokens = FIXED.num_tokens
    rows = (contexts, cu_q_lens, cu_q_lens[1:] - cu_q_lens[:-1])
    read: dict[int, set[int]] = {row: set() for row in range(3)}
    for geometry, queries in (
        (
            decode_geometry(dims, 3, 2, THREE, FIXED.num_rows),
            single_queries(*rows, num_tokens),
        ),
        (prompt_geometry(dims, 3, 2, THREE), tiles_of_queries(*rows, num_tokens, 42)),
    ):
        entries = plan(queries, geometry, num_tokens, window).entries
        loads = Loads(geometry, None, [], table, entries, None)
        per_block = 2 * dims.num_kv_heads * dims.block_size // geometry.run_rows
        for entry in np.flatnonzero((entries[:, NUM_TILES] > 0) & (entries[:, CONTEXT] > 0)):
            segment = segment_at(entries, entry, entries[entry, START], jnp.int32(10**6))
            for tile in range(segment.unit_tiles):
                first = entries[entry, FIRST_RUN] + tile * geometry.runs
                runs = loads.runs(segment, entries[entry, ROW], first)
                read[int(entries[entry, ROW])] |= {int(run) // per_block for run in runs}
    for row, (q_len, context) in enumerate(zip(q_lens, context_lens, strict=True)):
        lowest = max(0, context - q_len - window + 1) // 16
        seen = problem.block_table[row, lowest : -(-context // 16)]
        assert read[row] == set(seen.tolist())


def test_a_unit_that_begins_with_a_program_and_ends_in_another() -> None:
    """Three programs of one tile each: a row of one tile, then one of two."""
    problem = FIXED.problem((1, 1), (64, 128), seed=0)
    assert FIXED.error(problem) <= tolerance(problem.dtype)


@pytest.mark.parametrize(
    ("q_lens", "context_lens", "num_tokens", "num_rows"),
    [
        ((250,), (32_768,), 256, 256),
        ((1,) * 250, (4000,) * 250, 256, 256),
        ((1, 30), (9000, 2000), 32, 32),
        ((1,), (9000,), 1, 1),
    ],
    ids=["chunk", "decodes", "both", "one"],
)
def test_a_context_is_copied_once_per_unit_of_queries(
    q_lens: tuple[int, ...], context_lens: tuple[int, ...], num_tokens: int, num_rows: int
) -> None:
    """However many rows the arrays have room for: once per decode, once per 32 queries."""
    shape = SHAPES["llama-3-8b/decode_64x4k"]
    dims = KvDims(1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    padded = np.zeros((2, num_rows), np.int32)
    padded[:, : len(q_lens)] = q_lens, context_lens
    cu_q_lens = np.concatenate([[0], np.cumsum(padded[0])]).astype(np.int32)
    decode = decode_geometry(dims, 4, 2, Tiles(), num_rows)
    prompt = prompt_geometry(dims, 4, 2, Tiles())
    arrays = [jnp.asarray(x) for x in (padded[1], cu_q_lens, padded[0])]
    tokens, passes = pallas_gpu.passes_of(decode, prompt, *arrays, num_tokens)
    copied = sum(
        int(plan(queries, geometry, tokens, None).sizes[1]) * geometry.tile_tokens * geometry.heads
        for geometry, queries in passes
    )
    units = [-(-q // 32) for q in q_lens]
    least = shape.num_kv_heads * sum(u * c for u, c in zip(units, context_lens, strict=True))
    assert 0.95 * least <= copied <= 1.1 * least


def test_tiles_are_dealt_out_evenly() -> None:
    """One long row and many short ones: each program gets the same run of tiles, none is lost."""
    context_lens = np.array([5000, 3, 900, 1, 0, 64], np.int32)
    q_lens = np.array([1, 1, 1, 1, 0, 1], np.int32)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    dims = KvDims(10, 16, 8, 128)
    geometry = decode_geometry(dims, 4, 2, Tiles(num_programs=7), 6)
    assert (geometry.heads, geometry.tile_tokens, geometry.head_steps) == (8, 16, 1)
    arrays = [jnp.asarray(x) for x in (context_lens, cu_q_lens, q_lens)]
    got = plan(single_queries(*arrays, 5), geometry, 5, None)
    tiles = -(-context_lens // 16)
    ends = np.cumsum(tiles)
    assert list(got.sizes) == [-(-ends[-1] // 7), ends[-1]] == [54, 376]
    firsts = np.searchsorted(ends, np.arange(7) * 54, side="right")
    np.testing.assert_array_equal(got.first, firsts)
    assert list(firsts) == [0, 0, 0, 0, 0, 0, 2]


def test_copies_carry_many_heads() -> None:
    """Decodes: a copy brings all kv heads of a block that have room in 64 query rows and a tile; a
    single row is cut by head first, so that no unit has more parts than it must.
    """
    found = {}
    for model in ("llama-3-8b", "llama-3-70b-tp8", "qwen2.5-7b", "smollm2-135m"):
        for work in ("decode_64x4k", "decode_1x4k"):
            shape = SHAPES[f"{model}/{work}"]
            dims = KvDims(1, shape.block_size, shape.num_kv_heads, shape.head_dim)
            group = shape.num_heads // shape.num_kv_heads
            geometry = decode_geometry(dims, group, 2, Tiles(), shape.num_rows)
            found[model, work] = (geometry.heads, geometry.runs, geometry.columns, geometry.stages)
    assert found == {
        ("llama-3-8b", "decode_64x4k"): (8, 1, 128, 3),
        ("llama-3-8b", "decode_1x4k"): (1, 8, 128, 3),
        ("llama-3-70b-tp8", "decode_64x4k"): (1, 8, 128, 3),
        ("llama-3-70b-tp8", "decode_1x4k"): (1, 8, 128, 3),
        ("qwen2.5-7b", "decode_64x4k"): (4, 2, 128, 3),
        ("qwen2.5-7b", "decode_1x4k"): (1, 8, 128, 3),
        ("smollm2-135m", "decode_64x4k"): (3, 4, 192, 4),
        ("smollm2-135m", "decode_1x4k"): (1, 8, 128, 6),
    }


@pytest.mark.parametrize("name", SHAPES)
def test_default_tiles_pipeline_every_shape(name: str) -> None:
    shape = SHAPES[name]
    dims = KvDims(1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    itemsize = 1 if shape.is_quantised else 2
    sizes = (dims, shape.num_heads // shape.num_kv_heads, itemsize, Tiles())
    for geometry in (decode_geometry(*sizes, shape.num_rows), prompt_geometry(*sizes)):
        assert geometry.stages >= 3
        assert geometry.columns % 64 == 0
        assert geometry.queries * geometry.rows_per_query <= 64


def test_candidates_start_with_the_default_and_differ() -> None:
    arguments = [jax.ShapeDtypeStruct((1,), BF16)] * 3
    kind = compile_targets.TARGETS["h100"].device_kind
    base = pallas_gpu.default_tiles(*arguments, device_kind=kind)
    assert base.num_programs == 132
    found = list(pallas_gpu.candidate_tiles(base, 16))
    assert found[0] == base
    assert len(found) == len(set(found)) == 16


@pytest.mark.parametrize(
    ("device_kind", "num_sms"),
    [
        (None, 132), ("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H200", 132), ("NVIDIA H800", 132),
        ("NVIDIA H100 PCIe", 114), ("NVIDIA H800 PCIe", 114),
        ("NVIDIA H20", 78), ("NVIDIA H20-3e", 78),
    ],
)  # fmt: skip
def test_a_program_for_each_multiprocessor(device_kind: str | None, num_sms: int) -> None:
    shape = SHAPES["llama-3-8b/decode_64x4k"]
    assert support.why_not("pallas_gpu", device_kind, shape) is None
    arguments = [jax.ShapeDtypeStruct((1,), BF16)] * 3
    tiles = pallas_gpu.default_tiles(*arguments, device_kind=device_kind)
    assert tiles.num_programs == num_sms


def test_scales_are_padded_to_a_copy() -> None:
    plain = jnp.arange(3 * 2 * 5 * 16, dtype=jnp.float32).reshape(3, 2, 5, 16)
    laid = gpu_layout.lay_scales(plain)
    assert laid.shape == gpu_layout.kv_scales_shape(3, 16, 5) == (3, 2, 5, 32)
    np.testing.assert_array_equal(gpu_layout.plain_scales(laid, KvDims(3, 16, 5, 64)), plain)
    assert gpu_layout.kv_scales_shape(3, 64, 5) == (3, 2, 5, 64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dtype": jnp.float32}, r"bfloat16 queries \(wgmma has no float32\), got float32"),
        ({"block_size": 8}, r"block_size in \(16, 32, 64\) or a multiple of 128, got 8"),
        ({"head_dim": 96}, r"head_dim in \(64, 128\), got 96"),
        ({"num_heads": 65, "num_kv_heads": 1}, "at most 64 query heads per kv head, got 65"),
    ],
)
def test_what_it_cannot_do(sizes: dict[str, object], message: str) -> None:
    problem = make_problem((1,), (3,), **{"dtype": BF16, **sizes})
    with pytest.raises(NotImplementedError, match="pallas_gpu: needs " + message):
        problem.run("pallas_gpu")


BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def as_bits(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.lax.bitcast_convert_type(x, BITS[x.dtype.itemsize]))


def random_bits(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    kind = BITS[jnp.dtype(dtype).itemsize]
    bits = np.random.default_rng(0).integers(0, jnp.iinfo(kind).max, shape, np.uint32, True)
    return jax.lax.bitcast_convert_type(jnp.asarray(bits).astype(kind), dtype)


@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim", "block_size", "kv_dtype", "is_rotated"),
    [
        (70, 8, 128, 16, BF16, True),
        (5, 3, 64, 32, BF16, True),  # fewer tokens than a program takes
        (67, 1, 64, 128, BF16, False),
        (20, 2, 128, 16, INT8, True),
        (9, 4, 64, 64, FP8, False),
    ],
)
def test_write_kv_changes_exactly_its_slots(
    num_tokens: int, num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: jnp.dtype,
    is_rotated: bool,
) -> None:  # fmt: skip
    """Bit for bit against the reference, in a cache of random bits; padding is dropped."""
    rng = np.random.default_rng(num_tokens)
    num_blocks = 8
    k, v = (
        jnp.asarray(rng.standard_normal((num_tokens, num_kv_heads, head_dim)), BF16) for _ in "kv"
    )
    slots = rng.permutation(np.arange(block_size, num_blocks * block_size))[:num_tokens]
    slots[-3:] = num_blocks * block_size, 2**30, 2**31 - 1
    # Quarter turns are exact: other products may or may not be fused with their sum.
    quarters = rng.integers(0, 4, (num_tokens, head_dim // 2))
    unit = jnp.asarray([1.0, 0.0, -1.0, 0.0])
    rotation = (unit[quarters], unit[(quarters + 3) % 4]) if is_rotated else None
    blocks = random_bits((num_blocks, 2, num_kv_heads, block_size, head_dim), kv_dtype)
    scales = None if kv_dtype == BF16 else random_bits(blocks.shape[:-1], jnp.float32)
    padded = jnp.asarray(slots, jnp.int32)
    expected, expected_scales = write_kv(
        blocks, k, v, padded, rotation=rotation, kv_scales=scales, backend="reference"
    )
    laid = None if scales is None else gpu_layout.lay_scales(scales)
    got, got_scales = write_kv(
        blocks, k, v, padded, rotation=rotation, kv_scales=laid, backend="pallas_gpu"
    )
    np.testing.assert_array_equal(as_bits(got), as_bits(expected))
    assert (as_bits(got) != as_bits(blocks)).any()
    if scales is not None:
        plain = gpu_layout.plain_scales(got_scales, gpu_layout.kv_dims(got.shape))
        np.testing.assert_array_equal(as_bits(plain), as_bits(expected_scales))


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "dtype", "kv_dtype", "message"),
    [
        (2, 64, jnp.float32, jnp.float32, "bfloat16 keys and values, got float32"),
        (2, 32, BF16, BF16, "head_dim 64 or 128, got 32"),
        (65, 64, BF16, BF16, "at most 64 kv heads, got 65"),
        (3, 64, BF16, INT8, "a token's keys to be a multiple of 128 bytes, got 192"),
    ],
)
def test_what_write_kv_cannot_do(
    num_kv_heads: int, head_dim: int, dtype: jnp.dtype, kv_dtype: jnp.dtype, message: str
) -> None:
    k = jnp.zeros((1, num_kv_heads, head_dim), dtype)
    blocks = jnp.zeros((2, 2, num_kv_heads, 16, head_dim), kv_dtype)
    scales = gpu_layout.lay_scales(jnp.ones(blocks.shape[:-1])) if kv_dtype == INT8 else None
    with pytest.raises(NotImplementedError, match="pallas_gpu: needs " + message):
        write_module.write_kv(blocks, k, k, jnp.zeros(1, jnp.int32), kv_scales=scales)
