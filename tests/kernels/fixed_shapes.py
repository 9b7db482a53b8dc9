"""Batches of different rows in arrays of the same shapes, so that one compile serves them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kernels_pallas.problems import Problem, make_problem

LONGEST = 300  # context that is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What makes another program, beside the shapes of a step."""

    block_size: int = 16
    sliding_window: int | None = None
    kv_dtype: Any = None

    @property
    def most_blocks(self) -> int:
        """Of a row."""
        return -(-LONGEST // self.block_size)


# Each block size, window and dtype once; the rest is slow.
FEW_CACHES = (
    Cache(),
    Cache(block_size=32, sliding_window=21, kv_dtype=jnp.int8),
    Cache(block_size=64, sliding_window=1, kv_dtype=jnp.float8_e4m3fn),
    Cache(block_size=128, sliding_window=50),
)
ALL_CACHES = tuple(
    Cache(block_size=block_size, sliding_window=window, kv_dtype=kv_dtype)
    for block_size, window, kv_dtype in product(
        (16, 32, 64, 128), (None, 1, 21, 50, 200), (None, jnp.int8, jnp.float8_e4m3fn)
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedShapes:
    """R and T of every batch; M and P follow from the cache. `sizes` go to `make_problem`."""

    backend: str
    tiles: Any
    num_rows: int
    num_tokens: int
    sizes: dict[str, Any]

    def problem(
        self,
        q_lens: Sequence[int],
        context_lens: Sequence[int],
        seed: int,
        cache: Cache | None = None,
    ) -> Problem:
        cache = cache or Cache()
        needed = [-(-context // cache.block_size) for context in context_lens]
        return make_problem(
            q_lens,
            context_lens,
            seed=seed,
            block_size=cache.block_size,
            sliding_window=cache.sliding_window,
            kv_dtype=cache.kv_dtype,
            padding_rows=self.num_rows - len(q_lens),
            padding_tokens=self.num_tokens - sum(q_lens),
            padding_columns=cache.most_blocks + 2 - max(needed, default=0),
            spare_blocks=self.num_rows * cache.most_blocks + 3 - sum(needed),
            **self.sizes,
        )

    def answer(self, problem: Problem) -> np.ndarray:
        return problem.run(self.backend, tiles=self.tiles)

    def error(self, problem: Problem) -> float:
        return problem.error_of(self.answer(problem))

    def batches(self, longest_q: int, caches: Sequence[Cache]) -> st.SearchStrategy[Problem]:
        """Of rows with up to so many queries, in any of these caches."""

        @st.composite
        def draw_batch(draw: st.DrawFn) -> Problem:
            cache = draw(st.sampled_from(caches))
            q_lens: list[int] = []
            for _ in range(draw(st.integers(0, self.num_rows))):
                most = min(longest_q, self.num_tokens - sum(q_lens) - self.num_rows)
                q_lens.append(draw(st.one_of(st.just(1), st.integers(1, max(1, most)))))
            context_lens = [draw(st.integers(q, LONGEST)) for q in q_lens]
            return self.problem(q_lens, context_lens, draw(st.integers(0, 99)), cache)

        return draw_batch()


def drawn(num_examples: int) -> settings:
    """The same examples each time."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
