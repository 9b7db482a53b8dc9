"""Conformance of the host's backends against a dense numpy oracle; Pallas has files of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hidden_values import check_hidden_values

from kernels_pallas import problems
from kernels_pallas.paged_attention import (
    backend_module,
    choose_backend,
    paged_attention,
    xla,
)
from kernels_pallas.problems import Problem
from kernels_pallas.tolerances import tolerance

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

pytestmark = pytest.mark.parametrize("backend", ["reference", "xla"])


def make_problem(*args: object, **sizes: object) -> Problem:
    """Small blocks and heads, unless said otherwise."""
    return problems.make_problem(*args, **{"block_size": 4, "head_dim": 8, **sizes})


def check(problem: Problem, backend: str) -> None:
    assert problem.error(backend) <= tolerance(problem.dtype)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_q_len_against_every_context(backend: str, block_size: int) -> None:
    """The grid q_len <= context over lengths around block edges, as one mixed batch."""
    lengths = sorted({1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 70} - {0})
    pairs = [(q, context) for context in lengths for q in lengths if q <= context]
    q_lens, context_lens = zip(*pairs, strict=True)
    check(make_problem(q_lens, context_lens, block_size=block_size), backend)


@pytest.mark.parametrize(
    ("block_size", "dtype"), [(1, F32), (3, F32), (16, F32), (16, BF16)], ids=str
)
@pytest.mark.parametrize("sliding_window", [None, 1, 4, 1000])
def test_mixed_batch(
    backend: str, block_size: int, sliding_window: int | None, dtype: jnp.dtype
) -> None:
    check(
        make_problem(
            (1, 9, 1, 70, 2), (1, 9, 300, 75, 40), block_size=block_size, dtype=dtype,
            sliding_window=sliding_window,
        ),
        backend,
    )  # fmt: skip


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6], ids=["mqa", "gqa", "mha"])
def test_head_groups(backend: str, num_kv_heads: int) -> None:
    problem = make_problem((1, 6), (20, 11), num_heads=6, num_kv_heads=num_kv_heads)
    check(problem, backend)


def test_prompt_longer_than_tiles(backend: str) -> None:
    """Several query tiles, several context iterations, a last tile moved back to fit."""
    tiles = xla.Tiles()
    tile, context = tiles.tile_queries, tiles.tile_tokens
    q_lens, context_lens = (2 * tile + 3, context + 5), (context + tile, 2 * context + 7)
    for window in (None, tile + 5):
        problem = make_problem(q_lens, context_lens, padding_tokens=0, sliding_window=window)
        check(problem, backend)


def test_more_items_than_one_iteration_takes(backend: str) -> None:
    """One long row among many short ones: its parts meet in one iteration and across several."""
    tiles = xla.Tiles()
    long = (tiles.max_items + 5) * tiles.item_tokens + tiles.rest_tokens + 7
    context_lens = (5, 17, long, *range(1, 10))
    for window in (None, 100):
        problem = make_problem((1,) * 12, context_lens, block_size=16, sliding_window=window)
        check(problem, backend)


def test_block_larger_than_an_item(backend: str) -> None:
    check(make_problem((1, 5, 1), (300, 200, 129), block_size=128), backend)


@pytest.mark.parametrize(("padding_rows", "padding_tokens"), [(0, 0), (0, 1), (3, 0), (3, 40)])
def test_padding_is_zero_and_changes_nothing(
    backend: str, padding_rows: int, padding_tokens: int
) -> None:
    problem = make_problem(
        (1, 3, 1), (5, 3, 8), padding_rows=padding_rows, padding_tokens=padding_tokens
    )
    check(problem, backend)


def test_no_real_rows(backend: str) -> None:
    """A warm-up step: everything is padding, the pool is all NaN."""
    module = backend_module(backend)
    out = paged_attention(
        jnp.ones((4, 2, 8)),
        jnp.full(module.LAYOUT.kv_shape(3, 4, 1, 8), jnp.nan),
        jnp.zeros((2, 5), jnp.int32),
        jnp.zeros(2, jnp.int32),
        jnp.zeros(3, jnp.int32),
        0,
        scale=1.0,
        backend=backend,
    )
    np.testing.assert_array_equal(np.asarray(out), np.zeros((4, 2, 8)))


def test_block_permutation_changes_no_bit(backend: str) -> None:
    """The pool is only a place: the same contexts elsewhere give the same output."""
    problem = make_problem((1, 7, 1), (30, 9, 65))
    permutation = np.random.default_rng(1).permutation(np.arange(1, problem.num_blocks))
    moved = np.concatenate([[0], permutation]).astype(np.int32)  # old block id -> new
    kv = problem.kv_blocks(backend)
    moved_kv = jnp.zeros_like(kv).at[jnp.asarray(moved)].set(kv)

    def run(kv_blocks: jax.Array, table: np.ndarray) -> np.ndarray:
        return np.asarray(
            jax.jit(paged_attention, static_argnames=("scale", "backend"))(
                jnp.asarray(problem.q), kv_blocks, jnp.asarray(table),
                jnp.asarray(problem.context_lens), jnp.asarray(problem.cu_q_lens),
                jnp.int32(problem.num_rows), scale=0.5, backend=backend,
            )
        )  # fmt: skip

    expected = run(kv, problem.block_table)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(run(moved_kv, moved[problem.block_table]), expected)


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_nan_stays_in_its_row(backend: str, spoiled: int) -> None:
    """One request whose values overflowed must not spoil the batch."""
    q_lens, context_lens = (1, 5, 1, 1, 4), (9, 12, 80, 3, 6)
    problem = make_problem(q_lens, context_lens)
    clean = problem.run(backend)
    problem.stored[spoiled][1, 0, 0, 0] = np.nan  # value of the first token, kv head 0, dim 0
    got = problem.run(backend)
    first, last = problem.cu_q_lens[spoiled : spoiled + 2]
    assert np.isnan(got[first:last, 0, 0]).all(), "a NaN in the context must be seen"
    others = np.ones(len(got), bool)
    others[first:last] = False
    np.testing.assert_array_equal(got[others], clean[others])


def test_hidden_values_may_be_nan(backend: str) -> None:
    check_hidden_values(lambda problem: problem.run(backend), block_size=16, head_dim=8)


def test_one_compile_serves_all_contexts(backend: str) -> None:
    """Contexts, q_lens and num_rows are values, not shapes: the trip counts are dynamic."""
    problems = [
        make_problem(q_lens, context_lens, padding_rows=rows, padding_tokens=30 - sum(q_lens))
        for q_lens, context_lens, rows in (
            ((1, 1, 1, 1), (1, 2, 3, 4), 0),
            ((1, 8), (90, 8), 2),
            ((30,), (200,), 3),
        )
    ]
    traces = []

    @jax.jit
    def call(*args: jax.Array) -> jax.Array:
        traces.append(1)
        return paged_attention(*args, scale=problems[0].scale, backend=backend)

    for problem in problems:
        kv = problem.kv_blocks(backend)
        kv = jnp.pad(kv, [(0, 64 - len(kv)), *[(0, 0)] * (kv.ndim - 1)], constant_values=jnp.nan)
        table = np.pad(problem.block_table, ((0, 0), (0, 60 - problem.block_table.shape[1])))
        out = call(
            jnp.asarray(problem.q), kv, jnp.asarray(table), jnp.asarray(problem.context_lens),
            jnp.asarray(problem.cu_q_lens), jnp.int32(problem.num_rows),
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(out), problem.expected(), rtol=2e-6, atol=2e-6)
    assert len(traces) == 1


def test_auto_choice_is_a_backend(backend: str) -> None:
    chosen = {name: choose_backend(name) for name in ("cpu", "gpu", "cuda", "rocm", "tpu")}
    assert chosen == {
        "cpu": "xla",
        "gpu": "pallas_gpu",
        "cuda": "pallas_gpu",
        "rocm": "xla",
        "tpu": "pallas_tpu",
    }
    with pytest.raises(ValueError, match="platform='quantum'"):
        choose_backend("quantum")
    assert backend_module(backend).__name__.endswith(backend)
