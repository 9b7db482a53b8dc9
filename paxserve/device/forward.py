"""One step on the device: a pure function from parameters, state and arrays to state and outputs.

Owns: the function that is compiled, once per bucket and variant. In: `StepArrays` of one bucket.
Out: the state (donated in, so KV stays where it is) and what was sampled. Must not know: which
buckets exist, plans, requests.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from paxserve.arrays import StepArrays
from paxserve.device.buckets import Bucket
from paxserve.device.kv_blocks import Kernel, Kv
from paxserve.device.llama import Llama
from paxserve.device.sampling import greedy, sample, top_logprobs
from paxserve.device.sharding import per_device
from paxserve.pack import Variant
from paxserve.sampling_params import MAX_LOGPROBS


class StepShape(NamedTuple):
    """What one program is compiled for: a bucket, and what is done with the logits."""

    bucket: Bucket
    variant: Variant

    def __str__(self) -> str:
        """As an error names it."""
        return (
            f"step shape tokens={self.bucket.num_tokens} rows={self.bucket.num_rows} "
            f"variant={self.variant.value}"
        )

    @property
    def remedy(self) -> str:
        """See `executables.Shape`."""
        return "warm up that variant"


class DeviceState(NamedTuple):
    """What stays on the device between steps: KV per layer, and each row's last sampled token."""

    kv: Kv
    last_sampled: Int[Array, "max_num_seqs"]


class Logprobs(NamedTuple):
    """Of the sampled token, its rank (1 is best), and the best `MAX_LOGPROBS` ids."""

    chosen: Float[Array, "R"]
    rank: Int[Array, "R"]
    top_ids: Int[Array, "R k"]
    top: Float[Array, "R k"]


class StepOutputs(NamedTuple):
    """One token per row (-1: its logits are not finite); rows that do not sample hold noise."""

    tokens: Int[Array, "R"]
    logprobs: Logprobs | None


type Weights = nnx.State[Any, Any]


class Split(NamedTuple):
    """How a step is split over a group of devices: the partition specs of each array."""

    mesh: Mesh | None = None
    parameters: Any = None
    state: Any = None


NOT_SPLIT = Split()


def make_forward(
    graph: nnx.GraphDef[Llama], *, kernel: Kernel, split: Split = NOT_SPLIT
) -> jax.stages.Wrapped:
    """The step function `(parameters, state, arrays, variant) -> (state, outputs)`.

    Args:
        graph: of a `Llama` whose `axis` is that of the mesh, None without one.
        kernel: what its attention runs on.
        split: each device runs the step on its part; the step's arrays and outputs are the same
            on all.
    Donates: state.
    """

    def step(
        parameters: Weights, state: DeviceState, arrays: StepArrays, variant: Variant
    ) -> tuple[DeviceState, StepOutputs]:
        model = nnx.merge(graph, parameters)
        fed_back = state.last_sampled[arrays.row_ids[arrays.token_rows]]
        token_ids = jnp.where(arrays.token_ids < 0, fed_back, arrays.token_ids)
        hidden, kv = model.hidden(token_ids, state.kv, arrays, kernel=kernel)
        logits = model.logits(hidden[arrays.last_tokens])
        tokens = greedy(logits) if arrays.sampling is None else sample(logits, arrays.sampling)
        logprobs = None
        if variant is Variant.LOGPROBS:
            logprobs = Logprobs(*top_logprobs(logits, tokens, MAX_LOGPROBS))
        last_sampled = state.last_sampled.at[arrays.sampled_row_ids].set(tokens, mode="drop")
        return DeviceState(kv, last_sampled), StepOutputs(tokens, logprobs)

    def forward(
        parameters: Weights, state: DeviceState, arrays: StepArrays, variant: Variant
    ) -> tuple[DeviceState, StepOutputs]:
        run = per_device(
            partial(step, variant=variant),
            split.mesh,
            in_specs=(split.parameters, split.state, PartitionSpec()),
            out_specs=(split.state, PartitionSpec()),
        )
        return run(parameters, state, arrays)

    return jax.jit(forward, static_argnames="variant", donate_argnames="state")
