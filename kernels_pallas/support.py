"""What each backend can do, found by asking it: the table in README.

Owns: the list of cases, and the question. A backend that cannot raises NotImplementedError when it
is traced, so nothing is compiled or run. Out: the reasons. Must not know: why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import compile_targets
from kernels_pallas.checks import BACKEND_OF, abstract_arguments
from kernels_pallas.paged_attention import BACKENDS, paged_attention
from kernels_pallas.shapes import AttentionShape, shape_of
from kernels_pallas.write_kv import write_kv

_BASE = shape_of("llama-3-8b", "mixed_64+512")


def _quantised(kv_dtype: str, block_size: int) -> AttentionShape:
    return replace(_BASE, kv_dtype=kv_dtype, block_size=block_size)


CASES: Mapping[str, AttentionShape] = MappingProxyType(
    {
        "bfloat16": _BASE,
        "float32": replace(_BASE, dtype="float32", kv_dtype="float32"),
        "head_dim 64": replace(_BASE, head_dim=64),
        "head_dim 80": replace(_BASE, head_dim=80),
        "head_dim 256": replace(_BASE, head_dim=256),
        "one query head per kv head": replace(_BASE, num_kv_heads=_BASE.num_heads),
        "7 query heads per kv head": replace(_BASE, num_heads=28, num_kv_heads=4),
        "sliding window": replace(_BASE, sliding_window=4096),
        "context of 128k": replace(_BASE, max_model_len=131_072),
        **{f"block_size {s}": replace(_BASE, block_size=s) for s in (1, 8, 16, 32, 64, 128, 4096)},
        **{f"int8, block_size {s}": _quantised("int8", s) for s in (16, 32, 64, 128)},
        **{f"fp8, block_size {s}": _quantised("float8_e4m3fn", s) for s in (16, 32, 64, 128)},
    }
)


class Column(NamedTuple):
    """A backend, on a kind of device where that matters."""

    backend: str
    target: str | None

    def __str__(self) -> str:
        """Its heading."""
        return self.backend if self.target is None else f"{self.backend} {self.target}"


def columns() -> Iterator[Column]:
    """Backends that run anywhere, then each Pallas backend on its targets."""
    yield from (Column(b, None) for b in BACKENDS if b not in BACKEND_OF.values())
    for target in compile_targets.KERNEL_TARGETS:
        backend = BACKEND_OF[compile_targets.TARGETS[target].platform]
        if backend in BACKENDS:
            yield Column(backend, target)


def why_not(column: Column, shape: AttentionShape) -> str | None:
    """The reason why a backend cannot write and read this shape; None: it can."""
    kind = column.target and compile_targets.TARGETS[column.target].device_kind
    try:
        q, kv_blocks, *table, kv_scales = abstract_arguments(shape, column.backend)
        tokens = jax.ShapeDtypeStruct((q.shape[0], shape.num_kv_heads, shape.head_dim), q.dtype)
        slots = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
        write = partial(write_kv, backend=column.backend, device_kind=kind)
        jax.eval_shape(write, kv_blocks, tokens, tokens, slots, kv_scales=kv_scales)
        attend = partial(
            paged_attention,
            scale=1.0,
            sliding_window=shape.sliding_window,
            backend=column.backend,
            device_kind=kind,
        )
        jax.eval_shape(attend, q, kv_blocks, *table, kv_scales=kv_scales)
    except NotImplementedError as error:
        return str(error)
    return None


def table() -> list[str]:
    """The lines of a Markdown table; below it the reason of each `no`."""
    heads = list(columns())
    lines = ["| | " + " | ".join(map(str, heads)) + " |", "|---" * (len(heads) + 1) + "|"]
    reasons: dict[str, int] = {}
    for name, shape in CASES.items():
        cells = []
        for column in heads:
            reason = why_not(column, shape)
            number = None if reason is None else reasons.setdefault(reason, len(reasons) + 1)
            cells.append("yes" if number is None else f"no ({number})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", *[f"{number}. {reason}" for reason, number in reasons.items()]]


if __name__ == "__main__":
    print("\n".join(table()))
