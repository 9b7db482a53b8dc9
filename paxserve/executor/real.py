"""Runs steps on JAX devices.

Owns: the device state (KV, last sampled tokens), the parameters, and the executables: one per
bucket and variant, compiled ahead of use. In: plans. Out: results. One transfer in and one out per
step. Must not know: requests, policies.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxserve.arrays import StepArrays
from paxserve.device.buckets import Bucket, Buckets
from paxserve.device.forward import DeviceState, Logprobs, StepOutputs, make_forward
from paxserve.device.kv_blocks import allocate
from paxserve.device.llama import Llama
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.pack import PackedStep, Packer, Variant
from paxserve.step import NO_OUTPUT, RowOutput, StepPlan, StepResult, TokenLogprobs

type Progress = Callable[[int, int], None]


class _InFlight(NamedTuple):
    plan: StepPlan
    bucket: Bucket
    outputs: StepOutputs
    num_logprobs: tuple[int, ...]
    started_s: float
    compile_s: float


class Real:
    """The model on a device.

    Args:
        config, parameters: the model, parameters as numpy arrays by name.
        limits, buckets: sizes of the host's accounting, and the shapes to pad to.
        num_device_blocks: blocks in the device's pool, at least `limits.num_blocks`.
        backend: a name of `kernels_pallas.paged_attention.BACKENDS`.
        strict: after `warm_up`, a step that would compile is an error instead of a stall.
        fill: what unwritten KV holds; tests put NaN there.
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
        strict: bool = False,
        fill: float = 0.0,
    ) -> None:
        num_blocks = num_device_blocks or limits.num_blocks
        if num_blocks < limits.num_blocks:
            raise ValueError(
                f"num_device_blocks={num_blocks} is below the host's num_blocks={limits.num_blocks}"
            )
        dtype = str(parameters["embed"].dtype)
        model = Llama(
            config,
            {name: jnp.asarray(array) for name, array in parameters.items()},
            max_model_len=limits.max_model_len,
        )
        graph, self._parameters = nnx.split(model)
        self._forward = make_forward(graph, backend=backend)
        self._new_state = lambda: DeviceState(
            kv_blocks=allocate(
                config,
                num_blocks=num_blocks,
                block_size=limits.block_size,
                backend=backend,
                dtype=dtype,
                fill=fill,
            ),
            last_sampled=jnp.zeros(limits.max_num_seqs, jnp.int32),
        )
        self._state = self._new_state()
        self.backend = backend
        self.num_device_blocks = num_blocks
        self.limits = limits
        self.buckets = buckets
        self.strict = strict
        self._packer = Packer(
            limits=limits, buckets=buckets, num_slots=num_blocks * limits.block_size
        )
        self._num_logprobs = [-1] * limits.max_num_seqs
        self._executables: dict[tuple[Bucket, Variant], Any] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._is_warm = False

    @property
    def kv_blocks(self) -> tuple[jax.Array, ...]:
        """The KV arrays as they are now; the next step takes these buffers over."""
        return self._state.kv_blocks

    @property
    def executables(self) -> dict[tuple[Bucket, Variant], Any]:
        """What has been compiled; each has JAX's `memory_analysis()`."""
        return dict(self._executables)

    def warm_up(self, variants: Iterable[Variant], progress: Progress | None = None) -> float:
        """Compile and run every bucket once per variant, through the path real steps take.

        Returns:
            Seconds spent.
        """
        started_s = time.perf_counter()
        todo = self._missing(variants)
        self._is_warm = False
        try:
            for done, (bucket, variant) in enumerate(todo):
                if progress is not None:
                    progress(done, len(todo))
                outputs, _ = self._run(self._packer.padding(bucket, variant))
                jax.block_until_ready(outputs)
        except BaseException:
            self.reset()
            raise
        finally:
            self._is_warm = True
        if progress is not None:
            progress(len(todo), len(todo))
        return time.perf_counter() - started_s

    def num_missing(self, variants: Iterable[Variant]) -> int:
        """Executables that `warm_up` would build."""
        return len(self._missing(variants))

    def _missing(self, variants: Iterable[Variant]) -> list[tuple[Bucket, Variant]]:
        wanted = [(bucket, variant) for variant in variants for bucket in self.buckets.shapes]
        return [key for key in wanted if key not in self._executables]

    def submit(self, plan: StepPlan) -> None:
        """Start a step; returns before it has run."""
        started_s = time.perf_counter()
        packed = self._packer.pack(plan)
        for entry in plan.entries:
            self._num_logprobs[entry.row] = entry.sampling.num_logprobs
        outputs, compile_s = self._run(packed)
        num_logprobs = tuple([self._num_logprobs[row.row] for row in plan.rows])
        self._in_flight.append(
            _InFlight(plan, packed.bucket, outputs, num_logprobs, started_s, compile_s)
        )

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and fetch what it sampled."""
        step = self._in_flight.popleft()
        outputs: StepOutputs = jax.device_get(step.outputs)
        return StepResult(
            step_id=step.plan.step_id,
            outputs=_row_outputs(step.plan, outputs, step.num_logprobs),
            duration_s=time.perf_counter() - step.started_s,
            compile_s=step.compile_s,
            num_compiles=int(step.compile_s > 0),
            padded_tokens=step.bucket.num_tokens,
            padded_rows=step.bucket.num_rows,
        )

    def reset(self) -> None:
        """See `Executor.reset`; KV that a failed step took with it is allocated anew."""
        self._in_flight.clear()
        if any(array.is_deleted() for array in jax.tree.leaves(self._state)):
            self._state = self._new_state()

    def _run(self, packed: PackedStep) -> tuple[StepOutputs, float]:
        """Start the executable for these arrays; returns outputs and the seconds to build it."""
        arrays = jax.device_put(packed.arrays)
        key = (packed.bucket, packed.variant)
        compile_s = 0.0 if key in self._executables else self._compile(key, arrays)
        self._state, outputs = self._executables[key](self._parameters, self._state, arrays)
        return outputs, compile_s

    def _compile(self, key: tuple[Bucket, Variant], arrays: StepArrays) -> float:
        bucket, variant = key
        if self.strict and self._is_warm:
            raise RuntimeError(
                f"step shape tokens={bucket.num_tokens} rows={bucket.num_rows} "
                f"variant={variant.value} was not compiled at warm-up: warm up that variant, "
                "or set strict=False to compile while serving"
            )
        started_s = time.perf_counter()
        lowered = self._forward.lower(self._parameters, self._state, arrays, variant=variant)
        self._executables[key] = lowered.compile()
        return time.perf_counter() - started_s


def _row_outputs(
    plan: StepPlan, outputs: StepOutputs, num_logprobs: tuple[int, ...]
) -> tuple[RowOutput, ...]:
    tokens = outputs.tokens.tolist()
    if outputs.logprobs is None:
        return tuple(
            [
                RowOutput((token,)) if row.num_samples else NO_OUTPUT
                for row, token in zip(plan.rows, tokens, strict=False)
            ]
        )
    return tuple(
        [
            RowOutput((tokens[i],), _token_logprobs(outputs.logprobs, i, num_logprobs[i]))
            if row.num_samples
            else NO_OUTPUT
            for i, row in enumerate(plan.rows)
        ]
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
