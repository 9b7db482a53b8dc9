"""The TPU attention kernel, interpreted on the CPU, races looked for: numbers, isolation, refusals.

Small tiles and two cores make short contexts cross every edge that long ones cross on a chip.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import run_to_end
from device_forward import device_logits
from fixed_shapes import ALL_CACHES, FEW_CACHES, Cache, FixedShapes, drawn
from hidden_values import check_hidden_values
from hypothesis import given
from hypothesis import strategies as st
from real_builders import make_real, random_ids, real_engine, submit_ids

from kernels_pallas import problems
from kernels_pallas.cases import ROWS, case
from kernels_pallas.compile_targets import TARGETS
from kernels_pallas.interpret import interpreted
from kernels_pallas.paged_attention import pallas_tpu, tpu_layout
from kernels_pallas.paged_attention.layout import KvDims
from kernels_pallas.paged_attention.pallas_tpu import Tiles
from kernels_pallas.problems import Problem, make_problem
from kernels_pallas.shapes import SHAPES
from kernels_pallas.tolerances import tolerance
from paxserve.models.config import ModelConfig
from paxserve.models.load import LoadedModel
from paxserve.models.random_parameters import random_parameters

F32, BF16, INT8, FP8 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn
TWO_CORES = Tiles(query_tokens=16, context_tokens=128, num_buffers=2, num_cores=2)
ONE_CORE = Tiles(query_tokens=32, context_tokens=128, num_buffers=3, num_cores=1)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted("pallas_tpu", detect_races=True):
        yield


def check(problem: Problem, tiles: Tiles) -> None:
    assert problem.error("pallas_tpu", tiles=tiles) <= tolerance(problem.dtype)


# The slow tests have every kind of rows; here are those that cross most edges.
@pytest.mark.parametrize(
    ("name", "tiles", "options"),
    [
        ("chunks", ONE_CORE, {"table": "shared", "sliding_window": 21, "block_size": 32}),
        (
            "mixed", TWO_CORES,
            {"num_heads": 7, "num_kv_heads": 1, "dtype": BF16, "head_dim": 128, "block_size": 64},
        ),
        ("one_row", TWO_CORES, {"num_heads": 8, "num_kv_heads": 1, "block_size": 128}),
        ("peaky", TWO_CORES, {"dtype": BF16, "scale": -0.1}),
        (
            "skewed", ONE_CORE,
            {"num_heads": 3, "num_kv_heads": 3, "dtype": BF16, "padding": "much"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_rows(name: str, tiles: Tiles, options: dict[str, object]) -> None:
    check(case(name, **options), tiles)


@pytest.mark.parametrize(
    ("kv_dtype", "block_size", "num_kv_heads", "dtype"),
    [(INT8, 16, 1, BF16), (FP8, 64, 5, F32)],
)
def test_quantised(
    kv_dtype: jnp.dtype, block_size: int, num_kv_heads: int, dtype: jnp.dtype
) -> None:
    sizes = {"num_kv_heads": num_kv_heads, "num_heads": 2 * num_kv_heads, "block_size": block_size}
    check(
        make_problem((1, 20, 1), (150, 140, 3), kv_dtype=kv_dtype, dtype=dtype, **sizes), ONE_CORE
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 64), (BF16, 128)], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("group", "padding", "tiles"),
    [
        (1, "much", TWO_CORES), (3, "some", ONE_CORE), (4, "none", TWO_CORES),
        (7, "some", TWO_CORES), (8, "none", ONE_CORE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ROWS)
def test_all_rows(
    name: str, group: int, padding: str, tiles: Tiles, head_dim: int, dtype: jnp.dtype
) -> None:
    sizes = {"num_heads": 2 * group, "head_dim": head_dim, "dtype": dtype}
    check(case(name, padding=padding, **sizes), tiles)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, INT8, FP8], ids=["plain", "int8", "fp8"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("name", "table", "sliding_window"),
    [("chunks", "shared", 1), ("mixed", "permuted", 33), ("skewed", "shared", 200)],
)
def test_all_caches(
    name: str, table: str, sliding_window: int, block_size: int, kv_dtype: jnp.dtype
) -> None:
    sizes = {"sliding_window": sliding_window, "block_size": block_size, "kv_dtype": kv_dtype}
    check(case(name, table=table, dtype=BF16, **sizes), TWO_CORES)


@pytest.mark.parametrize(
    "rows",
    [((1,), (33_000,)), pytest.param(((20, 1), (32_900, 40)), marks=pytest.mark.slow)],
    ids=["decode", "chunk"],
)
def test_context_past_32k(rows: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "block_size": 128, "dtype": BF16}
    tiles = Tiles(query_tokens=16, context_tokens=2048, num_buffers=3, num_cores=2)
    check(make_problem(*rows, **sizes), tiles)


def test_hidden_values_may_be_nan() -> None:
    check_hidden_values(lambda problem: problem.run("pallas_tpu", tiles=TWO_CORES))


def test_only_blocks_that_are_seen_are_read() -> None:
    """A block id outside the pool raises when it is copied: past the context, before the window."""
    q_lens, context_lens, window = (1, 18, 1), (400, 300, 30), 50
    problem = make_problem(q_lens, context_lens, sliding_window=window, padding_columns=9)
    table = problem.block_table.copy()
    for row, (q_len, context) in enumerate(zip(q_lens, context_lens, strict=True)):
        table[row, : max(0, context - q_len - window + 1) // problem.block_size] = 10**6
        table[row, -(-context // problem.block_size) :] = 10**6
    table[len(q_lens) :] = 10**6
    got = problem.run("pallas_tpu", tiles=TWO_CORES, block_table=jnp.asarray(table))
    np.testing.assert_array_equal(got, problem.run("pallas_tpu", tiles=TWO_CORES))


# Batches of the same shapes.
FIXED = FixedShapes(
    backend="pallas_tpu", tiles=TWO_CORES, num_rows=5, num_tokens=48,
    sizes={"num_heads": 3, "num_kv_heads": 1},
)  # fmt: skip


@drawn(3)
@given(st.data())
@pytest.mark.parametrize("cache", FEW_CACHES, ids=str)
def test_drawn_batches(cache: Cache, data: st.DataObject) -> None:
    problem = data.draw(FIXED.batches(40, [cache]))
    assert FIXED.error(problem) <= tolerance(problem.dtype)


@pytest.mark.slow
@drawn(100)
@given(FIXED.batches(40, ALL_CACHES))
def test_many_drawn_batches(problem: Problem) -> None:
    assert FIXED.error(problem) <= tolerance(problem.dtype)


def test_nan_stays_in_its_row() -> None:
    """One request whose values overflowed must not spoil its neighbours in buffers and tiles."""
    problem = FIXED.problem((1, 19, 1, 3), (150, 40, 9, 70), seed=0)
    clean = FIXED.answer(problem)
    for spoiled in (0, 1, 2):
        values = problem.stored[spoiled][1]
        sound, values[0, 0, 0] = values[0, 0, 0], np.nan
        got = FIXED.answer(problem)
        values[0, 0, 0] = sound
        first, last = problem.cu_q_lens[spoiled : spoiled + 2]
        assert np.isnan(got[first:last, 0, 0]).all(), "a NaN in the context must be seen"
        others = np.r_[0:first, last : len(got)]
        np.testing.assert_array_equal(got[others], clean[others])


def test_one_compile_serves_all_values() -> None:
    sizes = []
    for rows in (((1, 1), (5, 200)), ((48,), (60,)), ((), ())):
        problem = FIXED.problem(*rows, seed=1)
        assert FIXED.error(problem) <= tolerance(problem.dtype)
        sizes.append(problems._attention._cache_size())
    assert sizes[0] == sizes[-1] >= 1


def test_layout_is_a_rearrangement() -> None:
    dims = KvDims(3, 32, 5, 64)
    plain = jnp.arange(3 * 2 * 5 * 32 * 64).reshape(3, 2, 5, 32, 64)
    laid = tpu_layout.lay_kv(plain)
    assert tpu_layout.kv_dims(laid.shape) == dims
    assert laid.shape == tpu_layout.kv_shape(*dims)
    assert laid[1, 4, 7, 64 + 9] == plain[1, 1, 4, 7, 9]
    np.testing.assert_array_equal(tpu_layout.plain_kv(laid), plain)
    scales = plain[..., 0].astype(jnp.float32)
    laid = tpu_layout.lay_scales(scales)
    assert laid.shape == tpu_layout.kv_scales_shape(3, 32, 5) == (3, 2, 1, 256)
    np.testing.assert_array_equal(tpu_layout.plain_scales(laid, dims), scales)
    with pytest.raises(ValueError, match=r"\[P, K, S, 2H\], got shape=\(3, 2, 5, 32, 64\)"):
        tpu_layout.kv_dims(plain.shape)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 8}, r"block_size must be one of \(16, 32, 64, 128\), got block_size=8"),
        ({"head_dim": 96}, "head_dim must be 64 or a multiple of 128, got head_dim=96"),
    ],
)
def test_what_it_cannot_do(sizes: dict[str, int], message: str) -> None:
    problem = make_problem((1,), (3,), **sizes)
    with pytest.raises(NotImplementedError, match="pallas_tpu: " + message):
        problem.run("pallas_tpu")


@pytest.mark.parametrize("device_kind", [None, *sorted({t.device_kind for t in TARGETS.values()})])
def test_tiles_fit_every_shape(device_kind: str | None) -> None:
    budget = pallas_tpu.VMEM_BYTES.get(device_kind, pallas_tpu.LEAST_VMEM_BYTES)
    for shape in SHAPES.values():
        q = jax.ShapeDtypeStruct((shape.num_tokens, shape.num_heads, shape.head_dim), shape.dtype)
        kv = jax.ShapeDtypeStruct(
            tpu_layout.kv_shape(2, shape.block_size, shape.num_kv_heads, shape.head_dim),
            shape.kv_dtype,
        )
        table = jax.ShapeDtypeStruct((shape.num_rows, shape.blocks_per_row), jnp.int32)
        base = pallas_tpu.default_tiles(q, kv, table, device_kind=device_kind)
        assert pallas_tpu.vmem_bytes(q, kv, base) <= budget
        found = list(pallas_tpu.candidate_tiles(base, shape.block_size))
        assert found[0] == base
        assert 4 <= len(found) == len(set(found))
        assert base.num_cores == pallas_tpu.NUM_CORES.get(device_kind, 2)


def test_wrong_tiles() -> None:
    problem = make_problem((1,), (3,))
    for change in ({"query_tokens": 24}, {"context_tokens": 64}, {"num_buffers": 1}):
        fields = {"query_tokens": 16, "context_tokens": 128, "num_buffers": 2, "num_cores": 1}
        with pytest.raises(ValueError, match=f"tiles break a rule of Tiles.*{next(iter(change))}"):
            problem.run("pallas_tpu", tiles=Tiles(**(fields | change)))


CONFIG = ModelConfig(
    vocab_size=97, hidden_size=32, mlp_size=48, num_layers=2, num_heads=3, num_kv_heads=1,
    head_dim=64, max_position=64, layer_windows=(None, 17),
)  # fmt: skip


def test_engine_gives_the_tokens_of_xla() -> None:
    """Prompts in chunks beside decodes, the cache full of NaN."""
    parameters = random_parameters(CONFIG, seed=5)
    model = LoadedModel(config=CONFIG, parameters=parameters, tokenizer=None, name="random")
    tokens = {}
    for backend in ("xla", "pallas_tpu"):
        sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
        real = make_real(model, backend=backend, token_buckets=(16,), **sizes)
        engine = real_engine(real, model)
        requests = [
            submit_ids(engine, random_ids(n, vocab_size=97, seed=n), max_tokens=3) for n in (3, 25)
        ]
        run_to_end(engine)
        tokens[backend] = [
            request.sequence.token_ids[request.num_prompt_tokens :] for request in requests
        ]
    assert [len(ids) for ids in tokens["xla"]] == [3, 3]
    assert tokens["pallas_tpu"] == tokens["xla"]


@pytest.mark.slow
def test_model_gives_the_logits_of_xla() -> None:
    parameters = random_parameters(CONFIG, seed=5)
    ids = random_ids(40, vocab_size=97)
    got, expected = (
        device_logits(CONFIG, parameters, ids, block_size=16, backend=backend)
        for backend in ("pallas_tpu", "xla")
    )
    np.testing.assert_allclose(got, expected, atol=1e-4)
