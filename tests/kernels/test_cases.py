"""Every backend that runs on a CPU against the awkward cases; Pallas has files of its own."""

import jax.numpy as jnp
import pytest
from fixed_shapes import ALL_CACHES, FEW_CACHES, Cache, FixedShapes, drawn
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.cases import PADDING, ROWS, case
from kernels_pallas.paged_attention import xla
from kernels_pallas.problems import Problem
from kernels_pallas.tolerances import tolerance

HOST = ("reference", "xla")


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize(
    ("name", "padding"),
    [*((name, "some") for name in ROWS), *(("mixed", padding) for padding in PADDING)],
)
def test_float32(backend: str, name: str, padding: str) -> None:
    problem = case(name, padding=padding)
    assert problem.error(backend) <= tolerance(problem.dtype)


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("table", ["shared", "consecutive"])
def test_tables(backend: str, table: str) -> None:
    problem = case("chunks", table=table, block_size=4)
    assert problem.error(backend) <= tolerance(problem.dtype)


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_scales(backend: str, scale: float) -> None:
    problem = case("peaky", scale=scale)
    assert problem.error(backend) <= tolerance(problem.dtype)


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kv_dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantised(backend: str, dtype: jnp.dtype, kv_dtype: jnp.dtype) -> None:
    problem = case("mixed", dtype=dtype, kv_dtype=kv_dtype)
    assert problem.error(backend) <= tolerance(problem.dtype)


# Short contexts cross every edge of an iteration.
FIXED = FixedShapes(
    backend="xla", num_rows=5, num_tokens=48, sizes={"num_heads": 6, "num_kv_heads": 2},
    tiles=xla.Tiles(
        item_tokens=64, rest_tokens=16, max_items=4, tile_queries=8, tile_tokens=32
    ),
)  # fmt: skip
ODD = (Cache(block_size=1, sliding_window=33), Cache(block_size=3, kv_dtype=jnp.int8))


@drawn(5)
@given(st.data())
@pytest.mark.parametrize("cache", FEW_CACHES + ODD, ids=str)
def test_drawn_batches(cache: Cache, data: st.DataObject) -> None:
    problem = data.draw(FIXED.batches(40, [cache]))
    assert FIXED.error(problem) <= tolerance(problem.dtype)


@pytest.mark.slow
@drawn(300)
@given(FIXED.batches(40, ALL_CACHES + ODD))
def test_many_drawn_batches(problem: Problem) -> None:
    assert FIXED.error(problem) <= tolerance(problem.dtype)
