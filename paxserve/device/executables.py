"""Programs compiled ahead of use, by their shape.

Owns: what has been built, how long it took, and the rule that after warm-up nothing more is built
when strict. In: a shape, and the jitted function with the arguments to lower it for. Must not know:
what the programs do.
"""

import time
from typing import Any, Protocol

import jax


class Shape(Protocol):
    """A key: hashable; says what it is, and how to have it compiled at warm-up."""

    @property
    def remedy(self) -> str:
        """What to do when it is missing."""

    def __str__(self) -> str:
        """The shape in words."""


class Executables:
    """`programs` by shape; `num_compiles` and `compile_s` are totals.

    Invariant: while `strict and is_warm`, `programs` does not grow.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.is_warm = False
        self.programs: dict[Any, jax.stages.Compiled] = {}
        self.num_compiles = 0
        self.compile_s = 0.0

    def find(
        self, shape: Shape, function: jax.stages.Wrapped, *arguments: Any, **static: Any
    ) -> jax.stages.Compiled:
        """The program of this shape, built if it is not there.

        Raises:
            RuntimeError: it is not there, after a strict warm-up.
        """
        if shape not in self.programs:
            self._build(shape, function, arguments, static)
        return self.programs[shape]

    def _build(
        self,
        shape: Shape,
        function: jax.stages.Wrapped,
        arguments: tuple[Any, ...],
        static: dict[str, Any],
    ) -> None:
        if self.strict and self.is_warm:
            raise RuntimeError(
                f"{shape} was not compiled at warm-up: {shape.remedy}, "
                "or set strict=False to compile while serving"
            )
        started_s = time.perf_counter()
        self.programs[shape] = function.lower(*arguments, **static).compile()
        self.compile_s += time.perf_counter() - started_s
        self.num_compiles += 1
