"""Puts an engine together: model, sizes, policies, executor, clock.

Owns: which part gets what. In: a loaded model, settings, policies. Out: an `Engine`. Must not know:
Hydra, files, how the engine will be driven. jax is imported only when a real executor is built.
"""

from typing import TYPE_CHECKING

from paxserve.clock import VirtualClock, WallClock
from paxserve.cost_model import CostModel, Target
from paxserve.device.buckets import Buckets, Exact
from paxserve.engine import Engine
from paxserve.executor.scripted import Scripted
from paxserve.executor.simulated import Simulated
from paxserve.hardware import Hardware
from paxserve.intake import Intake
from paxserve.limits import Limits
from paxserve.models.dimensions import Dimensions
from paxserve.models.load import LoadedModel
from paxserve.notices import Notices, Say
from paxserve.policies import Policies
from paxserve.settings import EngineSettings
from paxserve.sizing import (
    PoolSize,
    check_host_pool,
    num_host_blocks,
    pool_size,
    step_bytes,
    workspace_warning,
)

if TYPE_CHECKING:
    from kernels_pallas.support import Choice
    from paxserve.folded import FoldedRequests

DEFAULT_BUDGET = 512


def real_engine(
    model: LoadedModel,
    *,
    settings: EngineSettings,
    policies: Policies,
    forks: bool,
    seed: int = 0,
    say: Say,
    logs_blocks: bool = False,
    folded: "FoldedRequests | None" = None,
) -> Engine:
    """An engine on JAX and the wall clock; not warmed up yet.

    Args:
        model: what to serve.
        settings, policies: how.
        forks: whether requests of several sequences may come, so that blocks are copied.
        seed: of requests that bring none.
        say: receives two lines, the kernel that was chosen and the size of the pool, and status
            and warnings while it runs.

    Raises:
        ValueError: sizes that do not fit the model, the memory, or each other.
        NotImplementedError: a kernel that cannot run this model, or for another platform.
    """
    from paxserve.device import memory
    from paxserve.executor.real import Real

    max_model_len = _model_len(settings, model.config.max_position)
    budget = _budget(settings, max_model_len, whole_prompts=policies.batching.whole_prompts)
    num_devices = settings.tensor_parallel_size
    kernel, size = _kernel_and_pool(model, settings, budget=budget, max_model_len=max_model_len)
    bytes_per_whole_block = num_devices * size.bytes_per_block
    limits = _limits(
        settings,
        max_model_len,
        budget,
        num_device_blocks=size.num_blocks,
        num_host_blocks=num_host_blocks(
            settings.swap_space_gib, bytes_per_block=bytes_per_whole_block
        ),
    )
    policies.check(limits)
    check_host_pool(
        limits.num_host_blocks * bytes_per_whole_block,
        available_bytes=memory.free_host_bytes(),
        other_bytes=num_devices * size.num_bytes if memory.platform() == "cpu" else 0,
    )
    why = "" if kernel.why is None else f" ({kernel.why})"
    say(f"kernel: {kernel.backend} on {_devices(memory.platform(), num_devices)}{why}")
    say(str(size) + _override_note(settings))
    executor = Real(
        config=model.config,
        parameters=model.parameters,
        limits=limits,
        buckets=_buckets(settings, limits),
        num_device_blocks=size.num_blocks,
        num_host_blocks=limits.num_host_blocks,
        copies=forks and policies.shares,
        backend=kernel.backend,
        kv_cache_dtype=settings.kv_cache_dtype,
        debug=settings.debug,
        tensor_parallel_size=num_devices,
        strict=settings.strict,
    )
    return Engine(
        limits=limits,
        policies=policies,
        executor=executor,
        clock=WallClock(),
        intake=Intake(
            limits=limits,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
            tokenizer=model.tokenizer,
            seed=seed,
        ),
        tokenizer=model.tokenizer,
        notices=_notices(policies, status=say, say=say),
        logs_blocks=logs_blocks,
        folded=folded,
    )


def _kernel_and_pool(
    model: LoadedModel, settings: EngineSettings, *, budget: int, max_model_len: int
) -> "tuple[Choice, PoolSize]":
    """What attention runs on, and how many blocks the devices' memory holds.

    Raises:
        ValueError, NotImplementedError: see `real_engine`.
    """
    from kernels_pallas.shapes import AttentionShape
    from paxserve.device import memory
    from paxserve.device.kv_blocks import KvLayout, kv_dtype
    from paxserve.device.sharding import check_group, group_devices, num_parts, share

    num_devices = settings.tensor_parallel_size
    check_group(model.config, num_devices)
    part = share(model.config, num_devices)
    activations = str(model.parameters["embed"].dtype)
    dtype = kv_dtype(settings.kv_cache_dtype, activations=activations)
    kernel = memory.choose_kernel(
        settings.kernel,
        AttentionShape(
            q_lens=(1,),
            context_lens=(1,),
            num_heads=part.num_heads,
            num_kv_heads=part.num_kv_heads,
            head_dim=part.head_dim,
            block_size=settings.block_size,
            dtype=activations,
            kv_dtype=dtype.name,
        ),
    )
    layout = KvLayout(part, settings.block_size, kernel.backend, dtype)
    # Not asked for where it decides nothing: not every device can say.
    is_given = settings.kv_cache_memory_bytes is not None
    free_bytes = 0 if is_given else memory.free_bytes(group_devices(num_devices))
    size = pool_size(
        platform=memory.platform(),
        free_bytes=free_bytes,
        weight_bytes=sum(
            array.nbytes // num_parts(name, num_devices) for name, array in model.parameters.items()
        ),
        step_bytes=step_bytes(
            part, num_tokens=budget, num_rows=settings.max_num_seqs, num_devices=num_devices
        ),
        bytes_per_block=layout.bytes_per_block,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        memory_utilization=settings.memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        num_devices=num_devices,
    )
    return kernel, size


def simulated_engine(
    *,
    model: Dimensions,
    hardware: Hardware,
    cost_model: CostModel,
    settings: EngineSettings,
    policies: Policies,
    pads: bool = False,
    leaps: bool = True,
    seed: int = 0,
    say: Say,
    logs_blocks: bool = False,
    folded: "FoldedRequests | None" = None,
    sampling: str | None = None,
) -> Engine:
    """An engine whose steps take, on a virtual clock, what a cost model says of them.

    Args:
        model, hardware: what serves on what; no weights and no device are needed.
        cost_model: how long steps take.
        settings, policies, seed, logs_blocks: as of `real_engine`.
        pads: steps cost what the padded shapes would that an engine on JAX compiles.
        leaps: runs of steps that are all alike are taken in one move.
        sampling: the variant of the steps, for cost models that were measured of one; None: of
            any.
        say: receives the size of the pool, and warnings.

    Raises:
        ValueError: sizes that do not fit the model, the memory, or each other.
    """
    size, limits = planned_limits(
        model, hardware, settings, whole_prompts=policies.batching.whole_prompts
    )
    whole_block = settings.tensor_parallel_size * size.bytes_per_block
    policies.check(limits)
    say(str(size) + _override_note(settings))
    lacking = workspace_warning(
        model.share(size.num_devices),
        size,
        usable_bytes=hardware.usable_bytes,
        num_tokens=limits.max_num_batched_tokens,
        num_rows=limits.max_num_seqs,
    )
    if lacking is not None:
        say(lacking)
    target = Target(
        model=model,
        hardware=hardware,
        num_devices=settings.tensor_parallel_size,
        kv_cache_dtype=settings.kv_cache_dtype,
        block_size=settings.block_size,
        sampling=sampling,
    )
    if leaps and not logs_blocks and not hasattr(policies.batching, "is_steady"):
        name = type(policies.batching).__name__
        say(f"batching {name} does not say what is steady, so steps are taken one by one")
    executor = Simulated(
        limits=limits,
        vocab_size=model.vocab_size,
        costs=cost_model.open(target),
        bytes_per_block=whole_block,
        buckets=_buckets(settings, limits) if pads else Exact(),
        leaps=leaps,
    )
    return Engine(
        limits=limits,
        policies=policies,
        executor=executor,
        clock=VirtualClock(),
        intake=Intake(limits=limits, vocab_size=model.vocab_size, seed=seed),
        notices=_notices(policies, status=None, say=say),
        logs_blocks=logs_blocks,
        folded=folded,
    )


def planned_limits(
    model: Dimensions,
    hardware: Hardware,
    settings: EngineSettings,
    *,
    whole_prompts: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[PoolSize, Limits]:
    """Pool and limits of an engine that served this model on this hardware: those of
    `simulated_engine`, and of `paxserve plan`.

    Args:
        model, hardware, settings: what serves on what, and how.
        whole_prompts: of the batching: prompts are never split.
        workspace_bytes: memory of the largest step on each device; default: `step_bytes`.

    Raises:
        ValueError: as of `planned_pool`, or sizes that do not fit each other.
    """
    max_model_len = _model_len(settings, model.max_position)
    budget = _budget(settings, max_model_len, whole_prompts=whole_prompts)
    size = planned_pool(
        model,
        hardware,
        settings,
        budget=budget,
        max_model_len=max_model_len,
        workspace_bytes=workspace_bytes,
    )
    whole_block = settings.tensor_parallel_size * size.bytes_per_block
    limits = _limits(
        settings,
        max_model_len,
        budget,
        num_device_blocks=size.num_blocks,
        num_host_blocks=num_host_blocks(settings.swap_space_gib, bytes_per_block=whole_block),
    )
    return size, limits


def planned_pool(
    model: Dimensions,
    hardware: Hardware,
    settings: EngineSettings,
    *,
    budget: int,
    max_model_len: int,
    workspace_bytes: int | None = None,
) -> PoolSize:
    """The pool of an engine that served this model on this hardware.

    Raises:
        ValueError: the model, or the KV that was asked for beside it, does not fit.
    """
    num_devices = settings.tensor_parallel_size
    part = model.share(num_devices)
    wanted = settings.kv_cache_memory_bytes or 0
    if part.weight_bytes + wanted > hardware.usable_bytes:
        beside = f" beside {wanted / 1e9:.1f} GB of KV" if wanted else ""
        raise ValueError(
            f"the model does not fit: {part.weight_bytes / 1e9:.1f} GB of weights on each of "
            f"{num_devices} {hardware.name}{beside}, which has {hardware.memory_bytes / 1e9:.1f} "
            f"GB, {hardware.reserved_bytes / 1e9:.1f} GB of them reserved: raise "
            "limits.tensor_parallel_size, or choose other hardware"
        )
    if workspace_bytes is None:
        workspace_bytes = step_bytes(
            part, num_tokens=budget, num_rows=settings.max_num_seqs, num_devices=num_devices
        )
    return pool_size(
        platform=hardware.platform,
        free_bytes=hardware.usable_bytes,
        weight_bytes=part.weight_bytes,
        step_bytes=workspace_bytes,
        bytes_per_block=part.kv_bytes_per_token(settings.kv_cache_dtype) * settings.block_size,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        memory_utilization=settings.memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        num_devices=num_devices,
    )


def scripted_engine(
    *,
    settings: EngineSettings,
    policies: Policies,
    vocab_size: int,
    step_s: float,
    kv_bytes_per_token: int = 131_072,
    seed: int = 0,
    say: Say,
    logs_blocks: bool = False,
    folded: "FoldedRequests | None" = None,
) -> Engine:
    """An engine without a model, on a virtual clock: every step takes `step_s`.

    `kv_bytes_per_token` is what a token's KV would take, to turn swap space into blocks. `say`
    receives warnings; there is no status line, since nobody waits.

    Raises:
        ValueError: no pool size, or sizes that do not fit each other.
    """
    num_blocks = settings.num_host_handed_blocks
    if settings.max_model_len is None or num_blocks is None:
        raise ValueError(
            "the scripted executor has neither model nor memory to size itself by: set "
            "limits.max_model_len and limits.num_blocks_override (or num_slots_override)"
        )
    max_model_len = settings.max_model_len
    budget = _budget(settings, max_model_len, whole_prompts=policies.batching.whole_prompts)
    limits = _limits(
        settings,
        max_model_len,
        budget,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks(
            settings.swap_space_gib, bytes_per_block=kv_bytes_per_token * settings.block_size
        ),
    )
    return Engine(
        limits=limits,
        policies=policies,
        executor=Scripted(
            limits=limits,
            vocab_size=vocab_size,
            step_s=step_s,
            num_host_blocks=limits.num_host_blocks,
        ),
        clock=VirtualClock(),
        intake=Intake(limits=limits, vocab_size=vocab_size, seed=seed),
        notices=_notices(policies, status=None, say=say),
        logs_blocks=logs_blocks,
        folded=folded,
    )


def _notices(policies: Policies, *, status: Say | None, say: Say) -> Notices:
    return Notices(
        status=status,
        warn=lambda message: say(f"warning: {message}"),
        can_preempt=policies.can_preempt,
    )


def _model_len(settings: EngineSettings, max_position: int) -> int:
    if settings.max_model_len is not None and settings.max_model_len > max_position:
        raise ValueError(
            f"max_model_len={settings.max_model_len} is beyond the model's {max_position} positions"
        )
    return max_position if settings.max_model_len is None else settings.max_model_len


def _budget(settings: EngineSettings, max_model_len: int, *, whole_prompts: bool) -> int:
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    least = max_model_len if whole_prompts else 1
    return max(DEFAULT_BUDGET, settings.max_num_seqs, least)


def _limits(
    settings: EngineSettings,
    max_model_len: int,
    budget: int,
    *,
    num_device_blocks: int,
    num_host_blocks: int,
) -> Limits:
    num_blocks = settings.num_host_handed_blocks
    if num_blocks is None:
        num_blocks = num_device_blocks
    if num_blocks > num_device_blocks:
        raise ValueError(
            f"num_blocks_override={num_blocks} is beyond the device's pool of {num_device_blocks} "
            "blocks: set kv_cache_memory_bytes, or raise what bounds the pool (memory, "
            "max_num_seqs x max_model_len)"
        )
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks
        if settings.num_host_blocks_override is None
        else settings.num_host_blocks_override,
        preempt_every_steps=settings.preempt_every_steps,
    )


def _buckets(settings: EngineSettings, limits: Limits) -> Buckets:
    return Buckets.for_limits(
        limits, row_buckets=settings.row_buckets, token_buckets=settings.token_buckets
    )


def _devices(platform: str, num_devices: int) -> str:
    return platform if num_devices == 1 else f"{num_devices} devices of {platform}"


def _override_note(settings: EngineSettings) -> str:
    if settings.num_host_handed_blocks is None:
        return ""
    num_usable = settings.num_host_handed_blocks - 1
    return f"; overridden: the host hands out {num_usable} of them"
