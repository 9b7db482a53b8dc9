"""Adversarial problems that every backend must get right: one list, for tests and
`paxserve check-kernels`.

Owns: which lengths, tables and paddings are awkward. Out: problems. Must not know: backends.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kernels_pallas.problems import Problem, make_problem

# Rows as (q_len, context_len), by block size.
Rows = Callable[[int], list[tuple[int, int]]]


def _edges(s: int) -> list[int]:
    """Lengths around the edge of a block, and some blocks."""
    return sorted({1, s - 1, s, s + 1, 2 * s, 3 * s + 2} - {0})


ROWS: Mapping[str, Rows] = MappingProxyType(
    {
        "decodes": lambda s: [(1, n) for n in _edges(s)],
        "prompts": lambda s: [(n, n) for n in _edges(s)],
        "chunks": lambda s: [
            (2, s),  # ends with its block
            (s, 3 * s),  # a block of tokens at the edge of one
            (s - 1 or 1, 2 * s + 1),
            (s + 1, 2 * s + 5),  # all but a few of the context
            (3, 4 * s + 1),
        ],
        "mixed": lambda s: [(1, 5), (37, 2 * s + 37), (1, 3 * s), (2, 2), (1, 1), (19, 19)],
        "one_row": lambda s: [(1, 2 * s + 1)],
        "one_chunk": lambda s: [(40, 3 * s + 40)],
        "nothing": lambda s: [],
        # One row far longer than its neighbours.
        "skewed": lambda s: [(1, 3), (1, 700 + s), (1, s + 2), (1, 8)],
        "peaky": lambda s: [(1, 3 * s), (20, 2 * s + 25), (1, 7)],
    }
)
# Scores in the tens, scaled by what is no power of two: rounding either of them shows.
SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"peaky": {"query_magnitude": 8.0, "head_dim": 128}}
)
PADDING: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": {"padding_rows": 0, "padding_tokens": 0, "padding_columns": 0},
        "some": {"padding_rows": 2, "padding_tokens": 3, "padding_columns": 2},
        "much": {"padding_rows": 5, "padding_tokens": 70, "padding_columns": 40},
    }
)


def case(name: str, *, block_size: int = 16, padding: str = "some", **sizes: Any) -> Problem:
    """The problem of this name; `sizes` go to `make_problem`, before those of the case.

    Rows may not be padded away altogether: `nothing` keeps its padding whatever is asked.
    """
    rows = ROWS[name](block_size)
    beyond = PADDING["some" if not rows and padding == "none" else padding]
    q_lens = [q for q, _ in rows]
    context_lens = [context for _, context in rows]
    sizes = {**SIZES.get(name, {}), **sizes}
    return make_problem(q_lens, context_lens, block_size=block_size, **beyond, **sizes)
