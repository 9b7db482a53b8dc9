"""Batches of different rows in arrays of the same shapes, so that one compile serves them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from kernels_pallas.problems import Problem, make_problem

LONGEST = 300  # context that is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedShapes:
    """R, T, M and P of every batch; `sizes` go to `make_problem`."""

    backend: str
    tiles: Any
    num_rows: int
    num_tokens: int
    num_columns: int = 24
    num_blocks: int = 101
    sizes: dict[str, Any]

    def problem(self, q_lens: Sequence[int], context_lens: Sequence[int], seed: int) -> Problem:
        needed = [-(-context // 16) for context in context_lens]
        return make_problem(
            q_lens,
            context_lens,
            seed=seed,
            padding_rows=self.num_rows - len(q_lens),
            padding_tokens=self.num_tokens - sum(q_lens),
            padding_columns=self.num_columns - max(needed, default=0),
            **self.sizes,
        )

    def answer(self, problem: Problem) -> np.ndarray:
        kv = problem.kv_blocks(self.backend)
        missing = self.num_blocks - len(kv)
        kv = jnp.pad(kv, [(0, missing), *[(0, 0)] * (kv.ndim - 1)], constant_values=jnp.nan)
        return problem.run(self.backend, tiles=self.tiles, kv_blocks=kv)

    def error(self, problem: Problem) -> float:
        return problem.error_of(self.answer(problem))

    def batches(self, longest_q: int) -> st.SearchStrategy[Problem]:
        @st.composite
        def draw_batch(draw: st.DrawFn) -> Problem:
            q_lens: list[int] = []
            for _ in range(draw(st.integers(0, self.num_rows))):
                most = min(longest_q, self.num_tokens - sum(q_lens) - self.num_rows)
                q_lens.append(draw(st.one_of(st.just(1), st.integers(1, max(1, most)))))
            context_lens = [draw(st.integers(q, LONGEST)) for q in q_lens]
            return self.problem(q_lens, context_lens, draw(st.integers(0, 99)))

        return draw_batch()
