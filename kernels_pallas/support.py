"""What each backend can do, found by asking it: `kernel=auto`, and a table.

Owns: the question, and the list of cases of `paxserve check-kernels --support`. A backend says from
shapes and dtypes what it refuses, and its kernels begin with the same check, so nothing is traced,
compiled or run. Out: the reasons. Must not know: why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import jax

from kernels_pallas import compile_targets, paged_attention, write_kv
from kernels_pallas.checks import PALLAS, abstract_arguments
from kernels_pallas.paged_attention import BACKENDS, choose_backend
from kernels_pallas.shapes import AttentionShape, shape_of

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

    heading: str
    backend: str
    device_kind: str | None = None


def columns() -> Iterator[Column]:
    """Backends that run anywhere, then each Pallas backend on its targets."""
    yield from (Column(backend, backend) for backend in BACKENDS if backend not in PALLAS)
    for name in compile_targets.KERNEL_TARGETS:
        target = compile_targets.TARGETS[name]
        backend = choose_backend(target.platform)
        yield Column(f"{backend} {name}", backend, target.device_kind)


class Choice(NamedTuple):
    """What `kernel=auto` stands for; `why` says why it is not the platform's own kernel."""

    backend: str
    why: str | None


def choose(platform: str, device_kind: str, shape: AttentionShape) -> Choice:
    """The platform's backend where it can run this shape, else xla.

    Raises:
        ValueError: an unknown platform.
    """
    backend = choose_backend(platform)
    why = None if backend not in PALLAS else why_not(backend, device_kind, shape)
    return Choice(backend if why is None else "xla", why)


def why_not(backend: str, device_kind: str | None, shape: AttentionShape) -> str | None:
    """The reason why a backend cannot write and read this shape; None: it can."""
    q, kv_blocks, *_ = abstract_arguments(shape, backend)
    k = jax.ShapeDtypeStruct((q.shape[0], shape.num_kv_heads, shape.head_dim), q.dtype)
    try:
        write_kv.check_supported(k, kv_blocks, backend=backend, device_kind=device_kind)
        paged_attention.check_supported(q, kv_blocks, backend=backend, device_kind=device_kind)
    except NotImplementedError as error:
        return str(error)
    return None


def table() -> list[str]:
    """The lines of a Markdown table; below it the reason of each `no`."""
    heads = list(columns())
    lines = [
        "| | " + " | ".join(head.heading for head in heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    reasons: dict[str, int] = {}
    for name, shape in CASES.items():
        cells = []
        for column in heads:
            reason = why_not(column.backend, column.device_kind, shape)
            number = None if reason is None else reasons.setdefault(reason, len(reasons) + 1)
            cells.append("yes" if number is None else f"no ({number})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", *[f"{number}. {reason}" for reason, number in reasons.items()]]
