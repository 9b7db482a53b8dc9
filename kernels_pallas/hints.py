"""Words for two mistakes that Python and JAX report without saying what to do.

Owns: those words. Must not know: what a kernel computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class NotTheFunction(ModuleType):
    """A package with a function of its own name; called in that one's place, it says so."""

    def __call__(self, *args: Any, **options: Any) -> None:
        """Raise TypeError."""
        name = self.__name__
        raise TypeError(f"{name} is a package: `from {name} import {name.rpartition('.')[2]}`")


@contextmanager
def runs_where_it_can(backend: str) -> Iterator[None]:
    """Around a call of a backend. Under `jax.jit` the error arises later, and is JAX's own.

    Raises:
        ValueError: it is compiled for a CPU and cannot be.
    """
    try:
        yield
    except ValueError as error:
        if "interpret mode is supported on CPU" not in str(error):
            raise
        raise ValueError(
            f"{backend=} does not run on a CPU; use 'xla', or simulate it: "
            f"`with kernels_pallas.interpret.interpreted({backend!r}):`"
        ) from error
