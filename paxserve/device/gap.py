"""How near a sampled token was to being another one.

Owns: the gap of one output position, computed by itself, away from any engine. In: a model and the
tokens before the position. Out: a number. Must not know: how the tokens were served.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxserve.arrays import StepArrays
from paxserve.device.buckets import Exact
from paxserve.device.forward import Weights
from paxserve.device.kv_blocks import Kernel, Kv, KvLayout
from paxserve.device.llama import Llama
from paxserve.device.sampling import perturbed_logits
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.pack import Packer
from paxserve.step import RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

_BLOCK_SIZE = 16


class GapMeter:
    """One model; each question runs its whole context once, in one row."""

    def __init__(
        self, config: ModelConfig, parameters: dict[str, np.ndarray], *, backend: str
    ) -> None:
        self._config = config
        self._dtype = jnp.dtype(parameters["embed"].dtype)
        self._parameters = {name: jnp.asarray(array) for name, array in parameters.items()}
        self._kernel = Kernel(backend, jax.devices()[0].device_kind)

    def gap(
        self, token_ids: tuple[int, ...], *, num_prompt_tokens: int, sampling: RowSampling
    ) -> float:
        """Between the two best perturbed logits (greedy: logits) of the token after `token_ids`,
        what the filters leave; infinite where they leave one.
        """
        logits, arrays = self._run(token_ids, num_prompt_tokens, sampling)
        if arrays.sampling is not None:
            logits = perturbed_logits(logits, arrays.sampling)
        best, second = np.sort(np.asarray(logits[0], np.float64))[:-3:-1]
        return float(best - second)

    def logits(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Logits [V] float32 of the token after `token_ids`."""
        logits, _ = self._run(token_ids, len(token_ids), RowSampling())
        return np.asarray(logits[0])

    def _run(
        self, token_ids: tuple[int, ...], num_prompt_tokens: int, sampling: RowSampling
    ) -> tuple[jax.Array, StepArrays]:
        length = -(-len(token_ids) // _BLOCK_SIZE) * _BLOCK_SIZE
        model = Llama(self._config, self._parameters, max_model_len=length)
        layout = KvLayout(self._config, _BLOCK_SIZE, self._kernel.backend, self._dtype)
        kv = layout.allocate(1 + length // _BLOCK_SIZE)
        arrays = _arrays(token_ids, length, num_prompt_tokens, sampling)
        graph, state = nnx.split(model)
        return jax.jit(partial(_logits, graph, kernel=self._kernel))(state, kv, arrays), arrays


def _logits(
    graph: nnx.GraphDef[Llama],
    state: Weights,
    kv: Kv,
    arrays: StepArrays,
    *,
    kernel: Kernel,
) -> jax.Array:
    model = nnx.merge(graph, state)
    hidden, _ = model.hidden(arrays.token_ids, kv, arrays, kernel=kernel)
    return model.logits(hidden[arrays.last_tokens])


def _arrays(
    token_ids: tuple[int, ...], length: int, num_prompt_tokens: int, sampling: RowSampling
) -> StepArrays:
    num_blocks = 1 + length // _BLOCK_SIZE
    limits = Limits(
        max_num_seqs=1,
        max_num_batched_tokens=length,
        max_model_len=length,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    plan = StepPlan(
        step_id=1,
        rows=(RowPlan(0, 0, 0, len(token_ids), 1, token_ids),),
        entries=(RowEntry(0, 0, num_prompt_tokens, sampling),),
        table_writes=(TableWrite(0, 0, tuple(range(1, num_blocks))),),
    )
    packer = Packer(limits=limits, buckets=Exact(), num_slots=num_blocks * _BLOCK_SIZE)
    return packer.pack(plan).arrays
