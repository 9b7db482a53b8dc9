"""The simulators find what they are there for, and are as new after a failure."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import interpret, jax_versions
from kernels_pallas.interpret import interpreted

X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)


def copied_on_tpu(*, waits_first: bool) -> jax.Array:
    """x, through a buffer that is read after the copy into it has ended, or before."""

    def kernel(x, out, buffer, sem):
        copy = pltpu.make_async_copy(x, buffer, sem)
        copy.start()
        if waits_first:
            copy.wait()
        out[...] = buffer[...]
        if not waits_first:
            copy.wait()

    return pl.pallas_call(
        kernel,
        out_shape=X,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(X.shape, X.dtype), pltpu.SemaphoreType.DMA(())],
    )(X)


def copied_on_gpu(*, waits_first: bool) -> jax.Array:
    def body(x, out, buffer, barrier):
        plgpu.copy_gmem_to_smem(x, buffer, barrier)
        if waits_first:
            plgpu.barrier_wait(barrier)
        out[...] = buffer[...]
        if not waits_first:
            plgpu.barrier_wait(barrier)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
        scratch_types=(plgpu.SMEM(X.shape, X.dtype), plgpu.Barrier()),
        grid=(1,),
        grid_names=("program",),
    )(X)


@pytest.mark.parametrize(
    ("backend", "copied"),
    [("pallas_tpu", copied_on_tpu), ("pallas_gpu", copied_on_gpu)],
    ids=["tpu", "gpu"],
)
def test_a_race_raises_and_the_next_simulation_is_none_the_worse(backend, copied):
    with pytest.raises(Exception, match=r"(?i)race"), interpreted(backend, detect_races=True):
        jax.block_until_ready(copied(waits_first=False))
    with interpreted(backend, detect_races=True):
        np.testing.assert_array_equal(copied(waits_first=True), X)


@pytest.mark.parametrize(
    ("backend", "module", "name"),
    [
        ("pallas_tpu", pltpu, "reset_tpu_interpret_mode_state"),
        ("pallas_gpu", interpret, "reset_gpu_simulator"),
    ],
)
def test_a_simulator_is_reset_after_an_exception(monkeypatch, backend, module, name):
    resets = []
    monkeypatch.setattr(module, name, lambda: resets.append(backend))
    with interpreted(backend):
        pass
    assert resets == []
    with pytest.raises(ZeroDivisionError), interpreted(backend):
        raise ZeroDivisionError
    assert resets == [backend]
    jax_versions.reset_gpu_simulator()


def test_a_jax_that_only_prints_races_is_not_asked_for_them(monkeypatch):
    @dataclass
    class Older:
        detect_races: bool = False

    assert jax_versions.race_options(True) == {"detect_races": True, "on_race": "raise"}
    monkeypatch.setattr(plgpu, "InterpretGPUParams", Older)
    assert jax_versions.race_options(False) == {"detect_races": False}
    with pytest.raises(NotImplementedError, match="prints a race and goes on"):
        jax_versions.race_options(True)
