"""What can be proven about the Pallas kernels without their hardware: right numbers, no races, and
that the real compilers accept every named shape for every target.

Owns: the list of checks and how one is run. A check is plain data, so that it can be sent to
another process. Out: an `Outcome` each. Must not know: how they are spread over processes, how they
are shown.

    numerics   a case of `cases.py` in interpret mode against dense attention; races raise
    write      `write_kv` in interpret mode against the reference, every slot of the cache
    compile    a shape of `shapes.py` compiled for a target of `compile_targets.py`
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import cases, compile_targets
from kernels_pallas.interpret import interpreted
from kernels_pallas.paged_attention import backend_module, choose_backend, paged_attention
from kernels_pallas.quantised import QUANTISED_DTYPES
from kernels_pallas.shapes import SHAPES, AttentionShape
from kernels_pallas.tolerances import WRITE_TOLERANCE, tolerance
from kernels_pallas.write_kv import write_kv

PALLAS = ("pallas_tpu", "pallas_gpu")
# Shapes and cases that stand for the rest where time is short.
QUICK_SHAPES = (
    "smollm2-135m/mixed_64+512",
    "llama-3-8b/decode_64x4k",
    "llama-3-8b/prompts_8x2k",
    "llama-3-70b-tp8/decode_1x128k",
    "qwen2.5-7b/mixed_64+512",
    "mistral-7b/decode_1x128k",
    "llama-3-8b/mixed_64+512/int8/block128",
    "llama-3-8b/decode_64x4k/fp8/block128",
    "llama-3-8b/mixed_64+512/block64",
)
QUICK_TARGETS = ("v5e", "v4", "h100")
NO_COMPILER = "no compiler"
USUAL = {"dtype": "bfloat16", "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to prove.

    Args:
        kind: numerics, write or compile.
        backend: whose kernel.
        subject: the case or shape.
        target: what it is compiled for; cpu: interpret mode; here: the default device.
        sizes: of the case.
        device_kind: in interpret mode, whose tiles are run; None: those that suit any. On a device
            and for a target they are its own, measured ones included.
    """

    kind: str
    backend: str
    subject: str
    target: str = "cpu"
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    device_kind: str | None = None

    @property
    def case(self) -> str:
        """The subject with its sizes, by name, and tiles."""
        sizes = "".join(f" {name}={value}" for name, value in self.sizes.items())
        tiles = "" if self.device_kind is None else f" as {self.device_kind}"
        return f"{self.subject}{sizes}{tiles}"

    def __str__(self) -> str:
        """As a line names it."""
        return f"{self.kind} {self.backend} {self.case} on {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Args:
        verdict: ok; FAILED, which it is also where the backend says that it cannot: all that is
            checked here must hold, `support.py` asks what does not; or "no compiler", where the
            target's is not installed, so nothing is known.
        detail: in words.
        error, bound: of numbers, where the check compares any.
    """

    check: Check
    verdict: str
    seconds: float
    detail: str
    error: float | None = None
    bound: float | None = None

    @property
    def summary(self) -> str:
        """The detail in a line: of nested errors the innermost."""
        errors = [line.strip() for line in self.detail.splitlines() if "Error: " in line]
        return (errors or self.detail.splitlines() or [""])[-1]


def checks(*, quick: bool) -> Iterator[Check]:
    """All checks, or those that stand for the rest."""
    for backend in PALLAS:
        yield from interpreted_checks(backend, quick=quick)
    for target in QUICK_TARGETS if quick else compile_targets.KERNEL_TARGETS:
        backend = choose_backend(compile_targets.TARGETS[target].platform)
        kind = compile_targets.TARGETS[target].device_kind
        yield Check(
            kind="numerics", backend=backend, subject="mixed", sizes=USUAL, device_kind=kind
        )
        for subject in QUICK_SHAPES if quick else SHAPES:
            yield Check(kind="compile", backend=backend, subject=subject, target=target)


def interpreted_checks(backend: str, *, quick: bool) -> Iterator[Check]:
    """Numerics and writes, for interpret mode; with `target="here"` they run on the device."""
    changes: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in cases.ROWS]
    changes += [
        ("mixed", {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3}),
        ("mixed", {"sliding_window": 20}),
        ("peaky", {"scale": -0.1}),
        ("chunks", {"table": "shared", "block_size": 32}),
        ("mixed", {"kv_dtype": "int8", "block_size": 128}),
        ("mixed", {"kv_dtype": "float8_e4m3fn", "block_size": 128}),
    ]
    if not quick:
        changes += [("mixed", {"block_size": size}) for size in (32, 64, 128)]
        changes += [("chunks", {"num_heads": 2 * group}) for group in (1, 3, 7, 8)]
        changes += [("decodes", {"kv_dtype": dtype}) for dtype in ("int8", "float8_e4m3fn")]
    for subject, change in changes:
        yield Check(kind="numerics", backend=backend, subject=subject, sizes=USUAL | change)
    for kv_dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        sizes = {"kv_dtype": kv_dtype, "head_dim": 128, "block_size": 32}
        yield Check(kind="write", backend=backend, subject="rotated", sizes=sizes)


class _Found(NamedTuple):
    verdict: str
    detail: str
    error: float | None = None
    bound: float | None = None


def run_check(check: Check) -> Outcome:
    """Run it; nothing that goes wrong in it is raised."""
    run = {"numerics": _numerics, "write": _write, "compile": _compile}[check.kind]
    started_s = time.perf_counter()
    try:
        found = run(check)
    except compile_targets.NoCompiler as error:
        found = _Found(NO_COMPILER, str(error))
    except Exception as error:
        found = _Found("FAILED", f"{type(error).__name__}: {error}")
    return Outcome(check=check, seconds=time.perf_counter() - started_s, **found._asdict())


def _compared(error: float, bound: float) -> _Found:
    verdict = "ok" if error <= bound else "FAILED"  # NaN is no less than any bound
    return _Found(verdict, f"error {error:.1e} of {bound:.1e}", error, bound)


def _numerics(check: Check) -> _Found:
    problem = cases.case(check.subject, **check.sizes)
    with _where(check):
        error = problem.error(check.backend, device_kind=_device_kind(check))
    return _compared(error, tolerance(problem.dtype))


def _device_kind(check: Check) -> str | None:
    """Whose tiles it runs with: what an engine would run with there."""
    return str(jax.devices()[0].device_kind) if check.target == "here" else check.device_kind


def _where(check: Check) -> AbstractContextManager[None]:
    here = check.target == "here"
    return nullcontext() if here else interpreted(check.backend, detect_races=True)


def _write(check: Check) -> _Found:
    """Every slot, those that keep what they held included; padding is dropped."""
    kv_dtype, block_size = jnp.dtype(check.sizes["kv_dtype"]), check.sizes["block_size"]
    num_blocks, num_kv_heads, head_dim = 6, 2, check.sizes["head_dim"]
    rng = np.random.default_rng(0)
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    plain = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(kv_dtype)
    scales = jnp.asarray(rng.standard_normal(shape[:-1], np.float32))
    tokens = rng.standard_normal((2, 40, num_kv_heads, head_dim), np.float32)
    k, v = (jnp.asarray(x).astype(jnp.bfloat16) for x in tokens)
    phases = 6.0 * rng.random((40, head_dim // 2), np.float32)
    slots = rng.permutation(num_blocks * block_size)[:40].astype(np.int32)
    slots[37:] = num_blocks * block_size
    written = {}
    for backend in ("reference", check.backend):
        layout = backend_module(backend).LAYOUT
        with _where(check):
            blocks, scales_out = write_kv(
                layout.lay_kv(plain),
                k,
                v,
                jnp.asarray(slots),
                rotation=(jnp.asarray(np.cos(phases)), jnp.asarray(np.sin(phases))),
                kv_scales=layout.lay_scales(scales) if kv_dtype in QUANTISED_DTYPES else None,
                backend=backend,
                device_kind=_device_kind(check),
            )
        found = layout.plain_kv(blocks).astype(jnp.float32)
        if scales_out is not None:
            dims = layout.kv_dims(blocks.shape)
            found = found * layout.plain_scales(scales_out, dims)[..., None]
        written[backend] = found
    difference = jnp.abs(written["reference"] - written[check.backend])
    error = float(jnp.max(difference / (jnp.abs(written["reference"]) + 1.0)))
    return _compared(error, WRITE_TOLERANCE)


def abstract_arguments(shape: AttentionShape, backend: str) -> tuple[Any, ...]:
    """q, kv_blocks, block_table, context_lens, cu_q_lens, num_rows, and kv_scales or None, as
    shapes and dtypes. T and R are padded up to a multiple of 8, as a bucket would.
    """
    layout = backend_module(backend).LAYOUT
    num_rows = -(-shape.num_rows // 8) * 8
    num_tokens = max(num_rows, -(-shape.num_tokens // 8) * 8)
    kv = (shape.num_blocks, shape.block_size, shape.num_kv_heads)

    def array(dims: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    return (
        array((num_tokens, shape.num_heads, shape.head_dim), shape.dtype),
        array(layout.kv_shape(*kv, shape.head_dim), shape.kv_dtype),
        array((num_rows, shape.blocks_per_row), "int32"),
        array((num_rows,), "int32"),
        array((num_rows + 1,), "int32"),
        array((), "int32"),
        array(layout.kv_scales_shape(*kv), "float32") if shape.is_quantised else None,
    )


def _compile(check: Check) -> _Found:
    """Write a step's tokens and attend, as a layer does; the cache is donated."""
    shape, kind = SHAPES[check.subject], compile_targets.TARGETS[check.target].device_kind
    q, kv_blocks, *table, kv_scales = abstract_arguments(shape, check.backend)
    tokens = jax.ShapeDtypeStruct((q.shape[0], shape.num_kv_heads, shape.head_dim), q.dtype)
    slots = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
    phases = jax.ShapeDtypeStruct((q.shape[0], shape.head_dim // 2), jnp.float32)

    def layer(
        kv: tuple[jax.Array, jax.Array | None],
        q: jax.Array,
        tokens: tuple[jax.Array, jax.Array],
        slots: jax.Array,
        phases: tuple[jax.Array, jax.Array],
        table: list[jax.Array],
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        kv_blocks, kv_scales = write_kv(
            kv[0], *tokens, slots, rotation=phases, kv_scales=kv[1], backend=check.backend,
            device_kind=kind,
        )  # fmt: skip
        out = paged_attention(
            q, kv_blocks, *table, scale=shape.head_dim**-0.5, kv_scales=kv_scales,
            sliding_window=shape.sliding_window, backend=check.backend, device_kind=kind,
        )  # fmt: skip
        return out, (kv_blocks, kv_scales)

    compiled = compile_targets.compile_for(
        check.target, layer, (kv_blocks, kv_scales), q, (tokens, tokens), slots, (phases, phases),
        table, donate_argnums=0,
    )  # fmt: skip
    memory: Any = compiled.memory_analysis()
    cache_bytes = sum(_num_bytes(array) for array in (kv_blocks, kv_scales) if array is not None)
    if memory.alias_size_in_bytes < cache_bytes:
        return _Found(
            "FAILED",
            f"the cache is not written in place: of its {cache_bytes} bytes, scales included, "
            f"{memory.alias_size_in_bytes} are",
        )
    return _Found("ok", f"temporary {memory.temp_size_in_bytes / 2**20:.1f} MiB")


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return int(array.size) * array.dtype.itemsize
