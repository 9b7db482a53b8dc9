"""What a NaN among the values of a row's context may reach, whatever the backend."""

from collections.abc import Callable

import numpy as np

from kernels_pallas.problems import Problem, make_problem

WINDOW = 20


def check_hidden_values(answer: Callable[[Problem], np.ndarray], **sizes: object) -> None:
    """Nothing, from before every window of the row; nothing in other rows, from a prompt's last
    token. Row 1 is one prompt tile on every backend, and no window begins with a block.
    """
    problem = make_problem((1, 19, 1), (30, 90, 45), sliding_window=WINDOW, **sizes)
    clean = answer(problem)
    for row in range(3):
        first_query = problem.context_lens[row] - np.diff(problem.cu_q_lens)[row]
        problem.stored[row][1, : first_query - WINDOW + 1] = np.nan
    np.testing.assert_array_equal(answer(problem), clean)
    problem.stored[1][1, -1, 0, 0] = np.nan
    got = answer(problem)
    first, last = problem.cu_q_lens[1:3]
    assert np.isnan(got[last - 1, 0, 0]), "a NaN that is seen must be seen"
    others = np.r_[0:first, last : len(got)]
    np.testing.assert_array_equal(got[others], clean[others])
