"""Compiles for accelerators that are not there: TPU v4, v5e, v5p, v6e and H100, alone or in groups.

Owns: the description of each target, and how JAX is asked to compile for it. The real compilers run
(Mosaic, XLA, ptxas), so what exceeds VMEM or shared memory fails here as on the chip. Needs libtpu
and the CUDA plugin to be installed (`make check-kernels` does), no device. In: a function and
abstract arguments. Out: the compiled program, for its memory analysis. Must not know: kernels.

The variables of `compile_environment` must be set before jax is imported in the process.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
    use_abstract_mesh,
)

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device, or a group of equal ones.

    Args:
        platform: tpu or cuda.
        topology: JAX's name of the group.
        chip_config: libtpu's name of how a chip's cores make devices; None: its default.
        device_kind: what the device calls itself.
        num_devices: in the group.
        hbm_bytes: of one device.
    """

    platform: str
    topology: str
    chip_config: str | None = None
    device_kind: str
    num_devices: int = 1
    hbm_bytes: int


def _tpu(
    topology: str,
    device_kind: str,
    num_devices: int,
    hbm_gib: int,
    *,
    chip_config: str | None = None,
) -> Target:
    return Target(
        platform="tpu",
        topology=topology,
        chip_config=chip_config,
        device_kind=device_kind,
        num_devices=num_devices,
        hbm_bytes=hbm_gib * GIB,
    )


_H100_SXM = Target(
    platform="cuda",
    topology="1x1x1",
    device_kind="NVIDIA H100 80GB HBM3",
    hbm_bytes=80 * 10**9,
)
# Memory of one device: Google's system architecture pages, NVIDIA's H100 data sheet.
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        # A chip, as where a v4 is used: libtpu alone would make a device of each of its two cores.
        "v4": _tpu("v4:2x2x1", "TPU v4", 4, 32, chip_config="megacore"),
        "v5e": _tpu("v5e:2x2", "TPU v5 lite", 4, 16),
        "v5e-8": _tpu("v5e:2x4", "TPU v5 lite", 8, 16),
        "v5p": _tpu("v5p:2x2x1", "TPU v5", 4, 95),
        "v5p-8": _tpu("v5p:2x2x2", "TPU v5", 8, 95),
        "v6e": _tpu("v6e:2x2", "TPU v6 lite", 4, 32),
        "v6e-8": _tpu("v6e:2x4", "TPU v6 lite", 8, 32),
        "h100": _H100_SXM,
        "h100-8": replace(_H100_SXM, topology="1x1x8", num_devices=8),
    }
)
KERNEL_TARGETS = ("v4", "v5e", "v5p", "v6e", "h100")

# XLA's GpuTargetConfig of an H100 SXM: what its compiler asks a card for.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class NoCompiler(RuntimeError):
    """A target's compiler is not installed: nothing is known of what would be compiled."""


# Any of these brings it.
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}


@cache
def devices(name: str) -> tuple[jax.Device, ...]:
    """The devices of a target, to put into shardings and meshes.

    Raises:
        ValueError: an unknown target.
        NoCompiler: its compiler is not installed.
        RuntimeError: it is, and does not start.
    """
    if name not in TARGETS:
        raise ValueError(f"target {name!r} is unknown; use one of {list(TARGETS)}")
    target = TARGETS[name]
    try:
        if target.platform == "cuda":
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="", topology=target.topology, target_config=_H100
            )
        else:
            config = target.chip_config
            options = {} if config is None else {"chip_config_name": config}
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=target.topology, **options
            )
    except Exception as error:  # each plugin raises its own kind
        wanted = _COMPILERS[target.platform]
        is_there = any(find_spec(module) is not None for module in wanted)
        reason = error if is_there else f"{wanted[0]} is not installed"
        raise (RuntimeError if is_there else NoCompiler)(
            f"cannot compile for {name}: {reason}; `make check-kernels` installs what it needs"
        ) from error
    return tuple(found.devices)


def group_target(name: str, num_devices: int) -> str:
    """The smallest target of the same kind of device that has so many.

    Raises:
        ValueError: there is none.
    """
    kind = TARGETS[name].device_kind
    found = {n: target.num_devices for n, target in TARGETS.items() if target.device_kind == kind}
    fitting = [n for n in found if found[n] >= num_devices]
    if not fitting:
        raise ValueError(
            f"a group of {num_devices} {kind} cannot be compiled for; targets have {found}"
        )
    return min(fitting, key=lambda n: found[n])


def abstract(name: str, arguments: Any) -> Any:
    """Arrays, or shapes and dtypes, as abstract arguments that lie on a target's first device."""
    sharding = SingleDeviceSharding(devices(name)[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )


def compile_for(
    name: str, function: Callable[..., Any], *arguments: Any, **jit_options: Any
) -> jax.stages.Compiled:
    """`jax.jit(function)` of these arguments, compiled for one device of a target.

    Raises:
        Exception: whatever the compiler objects to, in its own words.
    """
    return compile_placed(name, jax.jit(function, **jit_options), *abstract(name, arguments))


def compile_placed(
    name: str, function: jax.stages.Wrapped, *arguments: Any, **static: Any
) -> jax.stages.Compiled:
    """A jitted function compiled for those of a target's devices that its abstract arguments lie
    on: one, or a mesh.

    Raises:
        Exception: whatever the compiler objects to, in its own words.
    """
    with _abstract_device(TARGETS[name]):
        traced = function.trace(*arguments, **static)
    return traced.lower(lowering_platforms=(TARGETS[name].platform,)).compile()


def _abstract_device(target: Target) -> AbstractContextManager[Any]:
    """Mosaic GPU looks at the device it traces for; say which, where no mesh of a group does."""
    if target.platform != "cuda" or target.num_devices > 1:
        return nullcontext()
    device = AbstractDevice(device_kind=target.device_kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    return use_abstract_mesh(mesh)
