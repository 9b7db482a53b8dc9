"""Runs steps on JAX devices.

Owns: the device state (KV, last sampled tokens), the parameters, and the executables: one per
bucket and variant, and those that move blocks, compiled ahead of use. In: plans. Out: results. One
transfer in and one out per step, beside swaps. Must not know: requests, policies.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from kernels_pallas.paged_attention import check_batch
from paxserve.arrays import StepArrays
from paxserve.device.block_moves import BlockMoves, MoveShape
from paxserve.device.buckets import Bucket, Buckets
from paxserve.device.executables import Executables
from paxserve.device.forward import (
    DeviceState,
    Logprobs,
    Split,
    StepOutputs,
    StepShape,
    make_forward,
)
from paxserve.device.kv_blocks import Kernel, KvLayout, kv_dtype
from paxserve.device.llama import Llama
from paxserve.device.sharding import (
    AXIS,
    check_group,
    group_devices,
    make_mesh,
    place_parameters,
    place_rest,
    shardings,
    share,
    specs_of,
)
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.pack import PackedStep, Packer, Variant
from paxserve.step import Outputs, StepPlan, StepResult, TokenLogprobs

type Progress = Callable[[int, int], None]


class _InFlight(NamedTuple):
    plan: StepPlan
    bucket: Bucket
    outputs: StepOutputs | None  # None: there was nothing to compute
    num_logprobs: tuple[int, ...]
    started_s: float
    compile_s: float
    num_compiles: int


class Real:
    """The model on a device, or split over a group of them.

    Args:
        config, parameters: the model, parameters as numpy arrays by name.
        limits, buckets: sizes of the host's accounting, and the shapes to pad to.
        num_device_blocks: blocks in the device's pool, at least `limits.num_blocks`.
        backend: a name of `kernels_pallas.paged_attention.BACKENDS`.
        kv_cache_dtype: auto (that of the activations), int8 or fp8.
        debug: check the values of every step's tables, lengths and slots on the host before they
            are sent; a wrong id would be clamped silently on the device.
        strict: after `warm_up`, a step that would compile is an error instead of a stall.
        fill: what unwritten KV holds; tests put NaN there.
        num_host_blocks: blocks that swaps may use on the host, numbered from 0.
        copies: plans may copy blocks, so warm-up compiles that too.
        tensor_parallel_size: devices of the group, the first that JAX has.

    Raises:
        ValueError: sizes that do not go together, or fewer devices than asked for.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        parameters: dict[str, np.ndarray],
        limits: Limits,
        buckets: Buckets,
        num_device_blocks: int | None = None,
        backend: str = "xla",
        kv_cache_dtype: str = "auto",
        debug: bool = False,
        strict: bool = False,
        fill: float = 0.0,
        num_host_blocks: int = 0,
        copies: bool = False,
        tensor_parallel_size: int = 1,
    ) -> None:
        check_group(config, tensor_parallel_size)
        mesh = make_mesh(group_devices(tensor_parallel_size))
        num_blocks = num_device_blocks or limits.num_blocks
        if num_blocks < limits.num_blocks:
            raise ValueError(
                f"num_device_blocks={num_blocks} is below the host's num_blocks={limits.num_blocks}"
            )
        self.dtype = str(parameters["embed"].dtype)
        layout = KvLayout(
            share(config, tensor_parallel_size),
            limits.block_size,
            backend,
            kv_dtype(kv_cache_dtype, activations=self.dtype),
        )
        model = Llama(
            config,
            place_parameters(parameters, mesh),
            max_model_len=limits.max_model_len,
            axis=None if mesh is None else AXIS,
        )
        graph, placed = nnx.split(model)
        self._parameters = place_rest(placed, mesh)
        self._everywhere = shardings(mesh, PartitionSpec())
        self._new_state = lambda: DeviceState(
            kv=layout.allocate(num_blocks, fill=fill, mesh=mesh),
            last_sampled=jnp.zeros(limits.max_num_seqs, jnp.int32, device=self._everywhere),
        )
        self._state = self._new_state()
        self._forward = make_forward(
            graph,
            kernel=Kernel(backend, device_kind=jax.devices()[0].device_kind),
            split=Split(mesh, specs_of(self._parameters), specs_of(self._state)),
        )
        self.backend = backend
        self.kv_cache_dtype = layout.dtype.name
        self.tensor_parallel_size = tensor_parallel_size
        self.num_device_blocks = num_blocks
        self.limits = limits
        self.buckets = buckets
        self.strict = strict
        self.debug = debug
        self._packer = Packer(
            limits=limits, buckets=buckets, num_slots=num_blocks * limits.block_size
        )
        self._num_logprobs = [-1] * limits.max_num_seqs
        self._executables = Executables(strict=strict)
        self._moves = BlockMoves(
            kv_blocks=self.kv_blocks,
            num_host_blocks=num_host_blocks,
            copies=copies,
            executables=self._executables,
            mesh=mesh,
        )
        self._in_flight: deque[_InFlight] = deque()

    @property
    def kv_blocks(self) -> tuple[jax.Array, ...]:
        """The KV arrays as they are now, layer by layer, a quantised layer's scales after its
        blocks; the next step takes these buffers over.
        """
        return tuple(jax.tree.leaves(self._state.kv))

    @property
    def bytes_per_block(self) -> int:
        """What a swap of one block moves, on all devices together."""
        return self._moves.bytes_per_block

    @property
    def executables(self) -> dict[Any, jax.stages.Compiled]:
        """What has been compiled, by `StepShape` and `MoveShape`; each has JAX's
        `memory_analysis()`.
        """
        return dict(self._executables.programs)

    def warm_up(self, variants: Iterable[Variant], progress: Progress | None = None) -> float:
        """Compile and run all that plans may need, through the path real steps take: every bucket
        once per variant, and the moves of blocks.

        Returns:
            Seconds spent.
        """
        started_s = time.perf_counter()
        todo = self._missing(variants)
        self._executables.is_warm = False
        try:
            for done, shape in enumerate(todo):
                if progress is not None:
                    progress(done, len(todo))
                self._rehearse(shape)
        except BaseException:
            self.reset()
            raise
        finally:
            self._executables.is_warm = True
        if progress is not None:
            progress(len(todo), len(todo))
        return time.perf_counter() - started_s

    def num_missing(self, variants: Iterable[Variant]) -> int:
        """Executables that `warm_up` would build."""
        return len(self._missing(variants))

    def _missing(self, variants: Iterable[Variant]) -> list[StepShape | MoveShape]:
        steps = [StepShape(bucket, v) for v in variants for bucket in self.buckets.shapes]
        wanted: list[StepShape | MoveShape] = [*steps, *self._moves.shapes]
        return [shape for shape in wanted if shape not in self._executables.programs]

    def _rehearse(self, shape: StepShape | MoveShape) -> None:
        if isinstance(shape, StepShape):
            jax.block_until_ready(self._run(self._packer.padding(*shape)))
        else:
            self._set_kv(jax.block_until_ready(self._moves.rehearse(self.kv_blocks, shape)))

    def submit(self, plan: StepPlan) -> None:
        """Start a step; returns before it has run, unless it swaps blocks out."""
        started_s = time.perf_counter()
        built = self._executables
        compile_s, num_compiles = built.compile_s, built.num_compiles
        packed = self._packer.pack(plan) if plan.rows else None  # else there are only swaps
        for entry in plan.entries:
            self._num_logprobs[entry.row] = entry.sampling.num_logprobs
        if plan.swap_out or plan.swap_in or plan.copies:
            self._set_kv(self._moves.run(self.kv_blocks, plan))
        self._in_flight.append(
            _InFlight(
                plan=plan,
                bucket=Bucket(0, 0) if packed is None else packed.bucket,
                outputs=None if packed is None else self._run(packed),
                num_logprobs=tuple([self._num_logprobs[place] for place in plan.columns.places]),
                started_s=started_s,
                compile_s=built.compile_s - compile_s,
                num_compiles=built.num_compiles - num_compiles,
            )
        )

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and fetch what it sampled."""
        step = self._in_flight.popleft()
        outputs: StepOutputs | None = jax.device_get(step.outputs)
        num_swapped = len(step.plan.swap_out) + len(step.plan.swap_in)
        return StepResult(
            step_id=step.plan.step_id,
            outputs=() if outputs is None else _row_outputs(step.plan, outputs, step.num_logprobs),
            duration_s=time.perf_counter() - step.started_s,
            compile_s=step.compile_s,
            num_compiles=step.num_compiles,
            padded_tokens=step.bucket.num_tokens,
            padded_rows=step.bucket.num_rows,
            padded_blocks=step.bucket.num_rows * self.limits.blocks_per_row,
            swap_bytes=num_swapped * self._moves.bytes_per_block,
        )

    def reset(self) -> None:
        """See `Executor.reset`; KV that a failed step took with it is allocated anew."""
        self._in_flight.clear()
        if any(array.is_deleted() for array in jax.tree.leaves(self._state)):
            self._state = self._new_state()

    def _set_kv(self, kv_blocks: tuple[jax.Array, ...]) -> None:
        structure = jax.tree.structure(self._state.kv)
        self._state = self._state._replace(kv=jax.tree.unflatten(structure, kv_blocks))

    def _run(self, packed: PackedStep) -> StepOutputs:
        """Start the program for these arrays."""
        if self.debug:
            self._check(packed.arrays)
        arrays = jax.device_put(packed.arrays, self._everywhere)
        program = self._program(packed, arrays)
        self._state, outputs = program(self._parameters, self._state, arrays)
        return outputs

    def _check(self, arrays: StepArrays) -> None:
        check_batch(
            block_table=arrays.block_table,
            context_lens=arrays.context_lens,
            cu_q_lens=arrays.cu_q_lens,
            num_rows=int(arrays.num_rows),
            num_tokens=len(arrays.token_ids),
            num_blocks=self.num_device_blocks,
            block_size=self.limits.block_size,
            slots=arrays.slots,
        )

    def _program(self, packed: PackedStep, arrays: StepArrays) -> jax.stages.Compiled:
        shape = StepShape(packed.bucket, packed.variant)
        arguments = (self._parameters, self._state, arrays)
        return self._executables.find(shape, self._forward, *arguments, variant=shape.variant)


def _row_outputs(plan: StepPlan, outputs: StepOutputs, num_logprobs: tuple[int, ...]) -> Outputs:
    num_samples, logprobs = plan.columns.num_samples, outputs.logprobs
    sampled = zip(outputs.tokens.tolist(), num_samples, strict=False)  # padding is left out
    tokens = [token if num else None for token, num in sampled]
    if logprobs is None:
        return Outputs(tokens)
    return Outputs(
        tokens,
        [
            _token_logprobs(logprobs, i, num_logprobs[i]) if num else ()
            for i, num in enumerate(num_samples)
        ],
    )


def _token_logprobs(logprobs: Logprobs, i: int, num: int) -> tuple[TokenLogprobs, ...]:
    if num < 0:
        return ()
    return (
        TokenLogprobs(
            logprob=float(logprobs.chosen[i]),
            rank=int(logprobs.rank[i]),
            top_ids=tuple(logprobs.top_ids[i, :num].tolist()),
            top_logprobs=tuple(logprobs.top[i, :num].tolist()),
        ),
    )
