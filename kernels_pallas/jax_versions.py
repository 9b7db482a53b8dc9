"""What differs between the JAX versions this package runs on (0.11.2 and 0.12).

Owns: one name per difference, and the one function that JAX documents and does not export. In and
out: references and arrays inside a Mosaic GPU kernel; options of the simulators. Must not know:
kernels.
"""

from dataclasses import fields
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any  # a reference to device memory: Pallas gives them no public type


def transposed(ref: Ref) -> Ref:
    """A reference [M, N] seen as [N, M]; nothing moves. 0.11 has a function, 0.12 a method."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))


def store(ref: Ref, value: jax.Array) -> None:
    """Store where bank conflicts cannot be avoided. 0.12 refuses that unless told; 0.11 does it."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def reset_gpu_simulator() -> None:
    """To be called after an exception, says `plgpu.InterpretGPUParams`; TPU's is exported."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def race_options(detect_races: bool) -> dict[str, Any]:
    """Options of a simulator that raises at a race, or looks for none. 0.11 would only print it.

    Raises:
        NotImplementedError: races are looked for by 0.11.
    """
    if not detect_races:
        return {"detect_races": False}
    if "on_race" not in {field.name for field in fields(plgpu.InterpretGPUParams)}:
        raise NotImplementedError(
            f"JAX {jax.__version__} prints a race and goes on: look for them with 0.12 or newer"
        )
    return {"detect_races": True, "on_race": "raise"}
