"""What a device has left, and what a step needs beside weights and KV.

Owns: the two estimates that size the pool, each of one device of a group, and the choice of a
kernel for it. Must not know: how the
pool is used.
"""

from collections.abc import Sequence

import jax
import psutil

from kernels_pallas.shapes import AttentionShape
from kernels_pallas.support import Choice, choose
from paxserve.models.config import ModelConfig


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
    """
    return min(_free_bytes(device, num_devices=len(devices)) for device in devices)


def _free_bytes(device: jax.Device, *, num_devices: int) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        return free_host_bytes() // num_devices
    return int(stats["bytes_limit"] - stats["bytes_in_use"])


def free_host_bytes() -> int:
    """Memory that the host has available."""
    return int(psutil.virtual_memory().available)


def step_bytes(config: ModelConfig, *, num_tokens: int, num_rows: int, num_devices: int = 1) -> int:
    """Upper bound of a step's temporary memory, beside weights, KV and inputs; float32.

    Two residual streams and a norm [T, D], the q, k, v and attention outputs [T, (2N + 2K) H],
    three MLP activations [T, F], the attention kernel's own working set, and four arrays of
    logits size [R, V] for sampling. Over a group, something for the two sums of each layer. Tests
    hold the compiled executables to it.

    Args:
        config: the model, or a device's share of it (`sharding.share`).
        num_tokens, num_rows: T and R of the largest step.
        num_devices: of the group.
    """
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 4 * config.hidden_size + 2 * heads + 3 * config.mlp_size
    per_row = 4 * config.vocab_size
    sums = 2 * config.num_layers * SUM_BYTES if num_devices > 1 else 0
    return 4 * (num_tokens * per_token + num_rows * per_row) + KERNEL_BYTES + sums


KERNEL_BYTES = 32 << 20  # gathered blocks and running sums of one layer's attention, with slack
SUM_BYTES = 2 << 20  # a TPU's compiler takes 0.9 to 1.5 MiB, whatever is summed, and reuses none
