"""Runs the Pallas backends on a CPU: JAX simulates the device's copies, semaphores and memory.

Owns: how each backend is simulated, and what counts as a fault there. Uninitialised memory is NaN,
a read out of bounds raises, and so does a race where they are looked for. Limits: a TMA copy of the
GPU's reads zeros out of bounds, as the device's does, so tests look at what is copied; asynchronous
wgmma is not modelled, so a missing wait for it passes here. Must not know: what a kernel computes.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.jax_versions import race_options, reset_gpu_simulator


def interpreted(backend: str, *, detect_races: bool = False) -> AbstractContextManager[None]:
    """Within it, calls of a Pallas backend run on the CPU; the other backends are left alone.

    Args:
        backend: a name of `kernels_pallas.paged_attention.BACKENDS`.
        detect_races: look for races between copies and computation; slower.
    Raises:
        NotImplementedError: this JAX does not raise where it detects a race.
    """
    match backend:
        case "pallas_tpu":
            return _uncached(_tpu(pltpu.InterpretParams(**race_options(detect_races))))
        case "pallas_gpu":
            return _uncached(_gpu(plgpu.InterpretGPUParams(**race_options(detect_races))))
    return nullcontext()


@contextmanager
def _uncached(simulated: AbstractContextManager[None]) -> Iterator[None]:
    """A simulated program calls back into this process: kept on disk, it would crash another."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        with simulated:
            yield
    finally:
        jax.config.update(name, before)


def is_interpreted() -> bool:
    """Whether GPU kernels traced now are for the simulator, which lacks wgmma of registers."""
    return _is_interpreted.get()


_is_interpreted: ContextVar[bool] = ContextVar("is_interpreted", default=False)


@contextmanager
def _tpu(params: pltpu.InterpretParams) -> Iterator[None]:
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()  # else the next simulation starts in this one's
        raise


LEAST_THREADS = 4


@contextmanager
def _gpu(params: plgpu.InterpretGPUParams) -> Iterator[None]:
    # A simulated warpgroup that waits holds a thread of JAX's CPU client, which has one per core or
    # per device, whichever are more; with too few of them the simulation would wait forever.
    num_threads = max(os.cpu_count() or 1, jax.local_device_count("cpu"))
    if num_threads < LEAST_THREADS:
        raise RuntimeError(
            f"the simulator of GPU kernels needs {LEAST_THREADS} CPU threads, got {num_threads=}; "
            f"set JAX_NUM_CPU_DEVICES={LEAST_THREADS} before jax starts"
        )
    token = _is_interpreted.set(True)
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield
    except BaseException:
        reset_gpu_simulator()  # as above
        raise
    finally:
        _is_interpreted.reset(token)
