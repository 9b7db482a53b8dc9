"""Every backend that runs on a CPU against the awkward cases; Pallas has files of its own."""

import jax.numpy as jnp
import pytest

from kernels_pallas.cases import PADDING, ROWS, case
from kernels_pallas.tolerances import tolerance

HOST = ("reference", "xla")


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ROWS)
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
