"""The whole step of a model, compiled for devices that are not there, and what memory it takes.

Owns: which steps are compiled, the refusal of those that do not fit, and the arguments of a step
as shapes. The program is the one that `executor.real` runs, and the compiler is the target's own,
so its answer is what the device would say; no weight is ever made. In: a case. Out: bytes of one
device. Must not know: how a target is described to its compiler
(`kernels_pallas.compile_targets`).
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kernels_pallas.compile_targets import GIB, TARGETS, compile_placed, devices
from paxserve.device.buckets import Bucket, Exact
from paxserve.device.forward import DeviceState, Split, make_forward
from paxserve.device.kv_blocks import Kernel, KvLayout, kv_dtype
from paxserve.device.llama import Llama
from paxserve.device.sharding import (
    AXIS,
    check_group,
    make_mesh,
    num_parts,
    parameter_spec,
    share,
    specs_of,
)
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig, parameter_shapes
from paxserve.models.llama3 import LLAMA_3_8B, LLAMA_3_70B
from paxserve.pack import Packer, Variant
from paxserve.sizing import step_bytes

MODELS = {"llama-3-8b": LLAMA_3_8B, "llama-3-70b": LLAMA_3_70B}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One step of one model on some devices of a target.

    Args:
        config: the model.
        num_tokens, num_rows: the bucket.
        context_len: tokens of each row that the KV pool holds.
        max_model_len: tokens that the block table has room for.
        dtype: of weights and activations, as numpy names it.
        kv_cache_dtype: as in `EngineSettings`.
        tensor_parallel_size: devices of the group.
        variant: what is done with the logits.

    Raises:
        ValueError: the group cannot share the model evenly.
    """

    config: ModelConfig
    num_tokens: int
    num_rows: int
    context_len: int = 4096
    max_model_len: int = 8192
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    variant: Variant = Variant.SAMPLED

    def __post_init__(self) -> None:
        """Check what the group must share."""
        check_group(self.config, self.tensor_parallel_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return 1 + self.num_rows * -(-self.context_len // self.block_size)

    @property
    def weight_bytes(self) -> int:
        """Weights that one device holds."""
        size, itemsize = self.tensor_parallel_size, jnp.dtype(self.dtype).itemsize
        return itemsize * sum(
            math.prod(shape) // num_parts(name, size)
            for name, shape in parameter_shapes(self.config).items()
        )

    @property
    def part(self) -> ModelConfig:
        """One device's share of the model."""
        return share(self.config, self.tensor_parallel_size)

    @property
    def step_bytes(self) -> int:
        """What an engine sets aside for the step's temporary memory."""
        return step_bytes(
            self.part,
            num_tokens=self.num_tokens,
            num_rows=self.num_rows,
            num_devices=self.tensor_parallel_size,
        )

    def kv_bytes(self, backend: str) -> int:
        """KV that one device holds."""
        return self.layout(backend).bytes_per_block * self.num_blocks

    def layout(self, backend: str) -> KvLayout:
        """One device's KV."""
        return KvLayout(
            self.part,
            self.block_size,
            backend,
            kv_dtype(self.kv_cache_dtype, activations=self.dtype),
        )


class StepMemory(NamedTuple):
    """Bytes of one device, as its compiler counts them; outputs include those that take over an
    argument's place (aliased).
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most that the device holds at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class StepRow(NamedTuple):
    """What is known of a case; bytes are those of one device.

    `refusal` says why it does not fit. `memory` and `seconds` (of compiling) are None where that
    was known without the compiler. `step_bytes` is what an engine sets aside for what the compiler
    then reports as `memory.temp_bytes`.
    """

    name: str
    target: str
    num_devices: int
    hbm_bytes: int
    weight_bytes: int
    kv_bytes: int
    step_bytes: int
    seconds: float | None
    memory: StepMemory | None
    refusal: str | None


class DoesNotFit(ValueError):
    """A step needs more memory than its devices have; the message has every number."""


# The work of `kernels_pallas.shapes`, as a step: a decode of 64 rows, and a chunk beside them.
_WORK = {"decode_64x4k": Bucket(64, 64), "mixed_64+512": Bucket(576, 65)}
# Model, target, devices, and whether it must fit.
_PLACES = (
    ("llama-3-8b", "v5p", 1, True),
    ("llama-3-8b", "h100", 1, True),
    ("llama-3-70b", "v5p", 4, True),
    ("llama-3-70b", "v5p-8", 8, True),
    ("llama-3-70b", "v6e-8", 8, True),
    ("llama-3-70b", "v6e", 4, False),
)


class NamedCase(NamedTuple):
    """A step that is checked, and whether it must fit or be refused."""

    name: str
    target: str
    case: StepCase
    must_fit: bool


def named_cases() -> Iterator[NamedCase]:
    """Each step that is checked."""
    for model, target, num_devices, must_fit in _PLACES:
        for work, bucket in _WORK.items():
            case = StepCase(
                config=MODELS[model],
                num_tokens=bucket.num_tokens,
                num_rows=bucket.num_rows,
                tensor_parallel_size=num_devices,
            )
            yield NamedCase(f"{model}/{work}", target, case, must_fit)


def check_step(name: str, target: str, case: StepCase, *, backend: str) -> StepRow:
    """Compile a case, or say why it does not fit.

    Args:
        name: of the case, to be told apart in a table.
        target: a name of `TARGETS`.
        backend: of the kernels.
    Raises:
        ValueError, RuntimeError: see `compile_targets.devices`.
        NotImplementedError: the backend cannot run this case.
    """
    memory, seconds, refusal = None, None, None
    started_s = time.perf_counter()
    try:
        check_fits(target, case, backend=backend)
        memory = compile_step(target, case, backend=backend)
        seconds = time.perf_counter() - started_s
        check_fits(target, case, backend=backend, memory=memory)
    except DoesNotFit as error:
        refusal = str(error)
    return StepRow(
        name=name,
        target=target,
        num_devices=case.tensor_parallel_size,
        hbm_bytes=TARGETS[target].hbm_bytes,
        weight_bytes=case.weight_bytes,
        kv_bytes=case.kv_bytes(backend),
        step_bytes=case.step_bytes,
        seconds=seconds,
        memory=memory,
        refusal=refusal,
    )


def fault(row: StepRow, *, must_fit: bool) -> str | None:
    """What is wrong with a row: another verdict than it must have, or a step that takes more than
    an engine sets aside for it; None: nothing.
    """
    if must_fit and row.refusal is not None:
        return f"it must fit: {row.refusal}"
    if not must_fit and row.refusal is None:
        return f"it must be refused, and fits: {row.memory}"
    if row.memory is not None and row.memory.temp_bytes > row.step_bytes:
        return (
            f"the compiler takes temp_bytes={row.memory.temp_bytes}, more than "
            f"step_bytes={row.step_bytes}, which an engine sets aside (paxserve/sizing.py)"
        )
    return None


def check_fits(
    target: str, case: StepCase, *, backend: str, memory: StepMemory | None = None
) -> None:
    """Compare with what one device has: weights and KV, or what the compiler found.

    Raises:
        DoesNotFit: it is more.
    """
    terms = {"weight_bytes": case.weight_bytes, "kv_bytes": case.kv_bytes(backend)}
    total = sum(terms.values())
    if memory is not None:
        terms = memory._asdict()
        total = memory.total_bytes
    hbm_bytes = TARGETS[target].hbm_bytes
    if total > hbm_bytes:
        listed = ", ".join(f"{name}={num_bytes}" for name, num_bytes in terms.items())
        raise DoesNotFit(
            f"the step does not fit on {target} x {case.tensor_parallel_size}: each device has "
            f"{hbm_bytes / GIB:.2f} GiB and needs {total / GIB:.2f} GiB: hbm_bytes={hbm_bytes}, "
            f"{listed}, with num_rows={case.num_rows}, context_len={case.context_len}, "
            f"num_blocks={case.num_blocks}: take more devices, fewer rows, a shorter context or "
            "kv_cache_dtype=int8"
        )


def compile_step(target: str, case: StepCase, *, backend: str) -> StepMemory:
    """Run the target's compiler.

    Raises:
        DoesNotFit: the compiler itself says so.
    """
    kernel = Kernel(backend, TARGETS[target].device_kind)
    forward, arguments = abstract_step(
        case, devices(target)[: case.tensor_parallel_size], kernel=kernel
    )
    try:
        compiled = compile_placed(target, forward, *arguments, variant=case.variant)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(
            f"the step does not fit on {target} x {case.tensor_parallel_size}, says the compiler: "
            f"{error}"
        ) from error
    found: Any = compiled.memory_analysis()
    return StepMemory(
        argument_bytes=found.argument_size_in_bytes,
        output_bytes=found.output_size_in_bytes,
        alias_bytes=found.alias_size_in_bytes,
        temp_bytes=found.temp_size_in_bytes,
    )


def abstract_step(
    case: StepCase, group: Sequence[jax.Device], *, kernel: Kernel
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """The step function, and its arguments as shapes that lie on a group of devices."""
    mesh = make_mesh(group)
    default = SingleDeviceSharding(group[0]) if mesh is None else NamedSharding(mesh, _EVERYWHERE)
    graph, weights = nnx.split(
        Llama(
            case.config,
            _parameters(case, mesh),
            max_model_len=case.max_model_len,
            axis=None if mesh is None else AXIS,
        )
    )
    last_sampled: Any = jax.ShapeDtypeStruct((case.num_rows,), jnp.int32)
    kv = case.layout(kernel.backend).arrays(case.num_blocks, mesh=mesh)
    state = DeviceState(kv, last_sampled)
    arguments = _placed((weights, state, _step_arrays(case)), default)
    split = Split(mesh, specs_of(arguments[0]), specs_of(arguments[1]))
    return make_forward(graph, kernel=kernel, split=split), arguments


_EVERYWHERE = PartitionSpec()


def _parameters(case: StepCase, mesh: Mesh | None) -> dict[str, Any]:
    dtype = jnp.dtype(case.dtype)
    return {
        name: jax.ShapeDtypeStruct(
            shape,
            dtype,
            sharding=None if mesh is None else NamedSharding(mesh, parameter_spec(name)),
        )
        for name, shape in parameter_shapes(case.config).items()
    }


def _step_arrays(case: StepCase) -> Any:
    limits = Limits(
        max_num_seqs=case.num_rows,
        max_num_batched_tokens=case.num_tokens,
        max_model_len=case.max_model_len,
        block_size=case.block_size,
        num_blocks=case.num_blocks,
    )
    packer = Packer(limits=limits, buckets=Exact(), num_slots=case.num_blocks * case.block_size)
    return packer.padding(Bucket(case.num_tokens, case.num_rows), case.variant).arrays


def _placed(arrays: Any, default: Sharding) -> Any:
    """Arrays, or shapes, as shapes with a sharding: their own if they lie on a mesh."""

    def place(array: Any) -> jax.ShapeDtypeStruct:
        own = getattr(array, "sharding", None)
        sharding = own if isinstance(own, NamedSharding) else default
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(place, arrays)
