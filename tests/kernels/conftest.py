"""Every kernel test runs with strict dtype promotion, and rank promotion raises."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
