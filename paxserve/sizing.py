"""How much memory the KV pools get, and how many blocks that is.

Owns: the arithmetic, every term of the device's pool in `PoolSize`. Over a group of devices every
byte is that of one device, which has a part of each block; only the host's pool has whole ones. In:
bytes and limits. Out: blocks. Must not know: jax; `device/memory.py` says what is free.
"""

import math
from dataclasses import dataclass

from paxserve.models.config import ModelConfig
from paxserve.models.dimensions import Dimensions

CPU_MOST_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The pool that was decided on; `num_blocks` includes the null block, and each of `num_devices`
    has `bytes_per_block` of every block.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    reason: str
    num_devices: int = 1

    @property
    def num_bytes(self) -> int:
        """Memory of one device that the pool takes."""
        return self.num_blocks * self.bytes_per_block

    def __str__(self) -> str:
        """The line an engine says at its start."""
        usable = self.num_blocks - 1
        each = f" on each of {self.num_devices} devices" if self.num_devices > 1 else ""
        full_length = usable // -(-self.max_model_len // self.block_size)
        return (
            f"KV pool: {usable} blocks of {self.block_size} = {usable * self.block_size} tokens, "
            f"{self.num_bytes / 2**20:.0f} MiB{each} ({self.reason}); "
            f"{full_length} requests of {self.max_model_len} tokens fit"
        )


def pool_size(
    *,
    platform: str,
    free_bytes: int,
    weight_bytes: int,
    step_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    memory_utilization: float,
    kv_cache_memory_bytes: int | None,
    num_devices: int = 1,
) -> PoolSize:
    """Blocks for the pool.

    Args:
        platform: cpu, or an accelerator.
        free_bytes: what the device has left before the weights are placed on it.
        weight_bytes: what those will take.
        step_bytes: what the largest step needs beside weights and KV.
        bytes_per_block: all layers.
        block_size, max_num_seqs, max_model_len: of the engine.
        memory_utilization: share of the free bytes after a step that KV may take, in (0, 1].
        kv_cache_memory_bytes: take exactly this much instead.
        num_devices: that share each block; on a CPU they share its memory too.

    Raises:
        ValueError: a value is out of range, or not even one block fits beside the null block.
    """
    if not 0 < memory_utilization <= 1:
        raise ValueError(f"memory_utilization must be in (0, 1], got {memory_utilization}")
    useful = 1 + max_num_seqs * -(-max_model_len // block_size)
    if kv_cache_memory_bytes is not None:
        budget, reason = kv_cache_memory_bytes, "kv_cache_memory_bytes"
        num_blocks = budget // bytes_per_block
    else:
        budget = int(memory_utilization * max(0, free_bytes - weight_bytes - step_bytes))
        reason = f"memory_utilization={memory_utilization}"
        if platform == "cpu" and budget > CPU_MOST_BYTES // num_devices:
            budget, reason = CPU_MOST_BYTES // num_devices, "at most 2 GiB on a CPU"
        num_blocks = budget // bytes_per_block
        if num_blocks > useful:
            num_blocks, reason = useful, "all that max_num_seqs x max_model_len can use"
    if num_blocks < 2:
        raise ValueError(
            f"the KV budget of {budget} bytes ({reason}) does not hold the null block and one "
            f"more of {bytes_per_block} bytes each: give it more memory or a smaller block_size"
        )
    return PoolSize(
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        reason=reason,
        num_devices=num_devices,
    )


KERNEL_BYTES = 32 << 20  # gathered blocks and running sums of one layer's attention, with slack
SUM_BYTES = 2 << 20  # a TPU's compiler takes 0.9 to 1.5 MiB, whatever is summed, and reuses none


def step_bytes(
    model: ModelConfig | Dimensions, *, num_tokens: int, num_rows: int, num_devices: int = 1
) -> int:
    """Upper bound of a step's temporary memory, beside weights, KV and inputs; float32.

    Two residual streams and a norm [T, D], the q, k, v and attention outputs [T, (2N + 2K) H],
    three MLP activations [T, F], the attention kernel's own working set, and four arrays of
    logits size [R, V] for sampling. Over a group, something for the two sums of each layer. Tests
    hold the compiled executables to it.

    Args:
        model: the model, or a device's share of it.
        num_tokens, num_rows: T and R of the largest step.
        num_devices: of the group.
    """
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    per_token = 4 * model.hidden_size + 2 * heads + 3 * model.mlp_size
    per_row = 4 * model.vocab_size
    sums = 2 * model.num_layers * SUM_BYTES if num_devices > 1 else 0
    return 4 * (num_tokens * per_token + num_rows * per_row) + KERNEL_BYTES + sums


def workspace_warning(
    part: Dimensions, size: PoolSize, *, usable_bytes: int, num_tokens: int, num_rows: int
) -> str | None:
    """What to say where a pool of a size that was asked for leaves too little for a step, by
    `step_bytes`. No error: that is an upper bound, several times what some compilers need.

    Args:
        part: a device's share of the model.
        size: of its pool.
        usable_bytes: of its memory.
        num_tokens, num_rows: of the largest step.
    """
    step = step_bytes(part, num_tokens=num_tokens, num_rows=num_rows, num_devices=size.num_devices)
    lacking = part.weight_bytes + size.num_bytes + step - usable_bytes
    if lacking <= 0:
        return None
    return (
        f"warning: by the estimate of workspace this does not fit: {part.weight_bytes / 1e9:.1f} "
        f"GB of weights, {size.num_bytes / 1e9:.1f} GB of KV ({size.reason}) and {step / 1e9:.1f} "
        f"GB for a step are {lacking / 1e9:.1f} GB more than there are; the last is an upper "
        f"bound, float32 activations of {num_tokens} tokens and logits of {num_rows} rows"
    )


def num_host_blocks(swap_space_gib: float, *, bytes_per_block: int) -> int:
    """Blocks of the host's pool: as many whole ones as the swap space holds, none for 0.

    Raises:
        ValueError: the space is no finite number >= 0, or holds not even one block.
    """
    is_number = isinstance(swap_space_gib, int | float) and not isinstance(swap_space_gib, bool)
    if not is_number or not 0 <= swap_space_gib < math.inf:
        raise ValueError(f"swap_space_gib must be a number >= 0, got {swap_space_gib!r}")
    num_blocks = math.floor(swap_space_gib * 2**30 / bytes_per_block)
    if swap_space_gib > 0 and num_blocks == 0:
        raise ValueError(
            f"swap_space_gib={swap_space_gib} does not hold one block of {bytes_per_block} bytes: "
            "raise it, or set it to 0 for no swapping"
        )
    return num_blocks


def check_host_pool(num_bytes: int, *, available_bytes: int, other_bytes: int) -> None:
    """Refuse a host pool that the host's memory does not hold.

    Args:
        num_bytes: of the host pool.
        available_bytes: what the host has left.
        other_bytes: what will be taken from that beside it; on a CPU, the device's pool.

    Raises:
        ValueError: it does not fit; the message has every term.
    """
    if num_bytes and num_bytes + other_bytes > available_bytes:
        raise ValueError(
            f"the host pool of {num_bytes / 2**30:.2f} GiB does not fit: the host has "
            f"{available_bytes / 2**30:.2f} GiB available, of which the device's pool takes "
            f"{other_bytes / 2**30:.2f} GiB: lower swap_space_gib"
        )
