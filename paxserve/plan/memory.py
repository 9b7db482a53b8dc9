"""Where every byte of a device goes, and how many requests that lets in.

Owns: the terms, which add up to the device's memory; two rules for the share of KV. In: a `Setup`.
Out: `MemoryPlan`. Must not know: time.
"""

from dataclasses import dataclass, replace

from paxserve.limits import Limits
from paxserve.plan import Setup

MANY_ROWS = 2**16
_SHORTEST, _MOST_CONTEXTS = 128, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Requests of `context` KV slots each: that memory holds at once, were there rows for them, and
    of those that run with max_num_seqs.
    """

    context: int
    num_in_memory: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each device: reserved, weights, step, KV and what is left make up all of it.

    Attributes:
        reserved_bytes: of the hardware: what no engine gets.
        weight_bytes: a device's share of the weights.
        step_bytes: set aside for the largest step: `estimated_step_bytes`, or what its compiler
            counts, with `is_compiled`.
        kv_bytes: the pool on the device: `num_device_blocks`, the null block among them.
        left_bytes: what memory_utilization leaves, and what no request could use; below 0 where
            a pool of a size that was asked for leaves too little for the step.
        reason: what sized the pool.
        rule_kv_bytes: memory_utilization of what reserved, weights and step leave: the engine's
            rule, before whole blocks and rows without a use.
        vllm_kv_bytes: memory_utilization of all memory, less weights and step: vLLM's rule, in
            which the rest of the memory has to cover what is reserved.
        kv_bytes_per_token, kv_bytes_per_token_and_layer: of the whole model, all devices together.
        num_blocks: what the engine hands out, the null block among them; fewer than the device
            has with num_blocks_override.
        max_num_seqs, max_num_batched_tokens, max_model_len: of the engine.
        capacities: from short contexts to the longest.
    """

    memory_bytes: int
    reserved_bytes: int
    weight_bytes: int
    step_bytes: int
    kv_bytes: int
    left_bytes: int
    estimated_step_bytes: int
    is_compiled: bool
    num_devices: int
    memory_utilization: float
    reason: str
    rule_kv_bytes: int
    vllm_kv_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_and_layer: int
    num_device_blocks: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    capacities: tuple[Capacity, ...]

    @property
    def num_tokens(self) -> int:
        """That the engine hands out."""
        return (self.num_blocks - 1) * self.block_size


def memory_plan(setup: Setup) -> MemoryPlan:
    """The terms.

    Raises:
        ValueError: the model does not fit; the message has the numbers.
    """
    size, limits = setup.limits()
    hardware, settings, model = setup.hardware, setup.settings, setup.model
    weights, step = setup.part.weight_bytes, setup.step_bytes(limits)
    share = settings.memory_utilization
    kv = setup.num_devices * setup.part.kv_bytes_per_token(settings.kv_cache_dtype)
    return MemoryPlan(
        memory_bytes=hardware.memory_bytes,
        reserved_bytes=hardware.reserved_bytes,
        weight_bytes=weights,
        step_bytes=step,
        kv_bytes=size.num_bytes,
        left_bytes=hardware.usable_bytes - weights - step - size.num_bytes,
        estimated_step_bytes=replace(setup, workspace_bytes=None).step_bytes(limits),
        is_compiled=setup.workspace_bytes is not None,
        num_devices=setup.num_devices,
        memory_utilization=share,
        reason=size.reason,
        rule_kv_bytes=int(share * max(0, hardware.usable_bytes - weights - step)),
        vllm_kv_bytes=int(share * hardware.memory_bytes) - weights - step,
        kv_bytes_per_token=kv,
        kv_bytes_per_token_and_layer=kv // model.num_layers,
        num_device_blocks=size.num_blocks,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        capacities=_capacities(limits, whole_memory(setup)),
    )


def whole_memory(setup: Setup) -> Limits:
    """As many blocks as memory holds beside the engine's largest step, though more rows than it has
    would be needed to use them.
    """
    limits = setup.limits()[1]
    wide = setup.with_settings(
        max_num_seqs=MANY_ROWS,
        max_num_batched_tokens=max(MANY_ROWS, limits.max_num_batched_tokens),
    )
    return replace(wide, workspace_bytes=setup.step_bytes(limits)).limits()[1]


def num_requests(limits: Limits, context: int) -> int:
    """Requests of so many KV slots that a pool holds at once."""
    return limits.num_usable_blocks // -(-context // limits.block_size)


def _capacities(limits: Limits, memory: Limits) -> tuple[Capacity, ...]:
    """Four times as long each time, up to the longest."""
    contexts = [limits.max_model_len]
    while len(contexts) < _MOST_CONTEXTS and contexts[-1] >= 4 * _SHORTEST:
        contexts.append(contexts[-1] // 4)
    return tuple(
        Capacity(
            context=context,
            num_in_memory=num_requests(memory, context),
            num_running=min(num_requests(limits, context), limits.max_num_seqs),
        )
        for context in reversed(contexts)
    )
