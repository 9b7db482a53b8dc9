"""What a device has left, and what a step needs beside weights and KV.

Owns: the two estimates that size the pool, each of one device of a group, and the choice of a
kernel for it. Must not know: how the pool is used.
"""

from collections.abc import Sequence

import jax
import psutil

from kernels_pallas.shapes import AttentionShape
from kernels_pallas.support import Choice, choose


def choose_kernel(kernel: str, shape: AttentionShape) -> Choice:
    """The attention backend that a kernel setting stands for on the first device.

    Args:
        kernel: a backend, or auto.
        shape: what it must be able to run, for auto.

    Raises:
        NotImplementedError: the kernel is for another platform.
    """
    device = jax.devices()[0]
    if kernel == "auto":
        return choose(device.platform, device.device_kind, shape)
    needed = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}.get(kernel, device.platform)
    if device.platform != needed:
        raise NotImplementedError(
            f"kernel={kernel} runs on a {needed}, but the device is a {device.platform}: use auto, "
            "or xla"
        )
    return Choice(kernel, None)


def platform() -> str:
    """JAX's name of the kind of machine: cpu, gpu or tpu."""
    return str(jax.devices()[0].platform)


def device_kind() -> str:
    """What the first device calls itself."""
    return str(jax.devices()[0].device_kind)


def free_bytes(devices: Sequence[jax.Device]) -> int:
    """Memory that each of these devices could still allocate: what the fullest has left; for CPU
    devices an equal part of what the host has available, which they all live in.

    Raises:
        NotImplementedError: an accelerator does not say.
    """
    return min(_free_bytes(device, num_devices=len(devices)) for device in devices)


def _free_bytes(device: jax.Device, *, num_devices: int) -> int:
    if device.platform == "cpu":
        return free_host_bytes() // num_devices
    stats = device.memory_stats()
    if stats is None:
        raise NotImplementedError(
            f"the {device.platform} {device.device_kind} has no memory statistics, so what is free "
            "for KV is not known: say how much it may take with limits.kv_cache_memory_bytes"
        )
    return int(stats["bytes_limit"] - stats["bytes_in_use"])


def free_host_bytes() -> int:
    """Memory that the host has available."""
    return int(psutil.virtual_memory().available)
