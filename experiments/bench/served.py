"""Steps of SmolLM2 over rows whose contexts have given lengths, and the floor under a step.

Owns: the executor, its pool and the plans. In: lengths of contexts, buckets. Out: what a part can
time. Must not know: bars.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import jax
import jax.numpy as jnp

from paxserve.device import compile_cache
from paxserve.device.buckets import Bucket, Buckets
from paxserve.executor.real import Real
from paxserve.limits import Limits
from paxserve.models.load import LoadedModel, load_model
from paxserve.pack import Variant
from paxserve.step import RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

BLOCK_SIZE = 16


@cache
def smollm2() -> LoadedModel:
    """The model of all device parts."""
    compile_cache.enable()
    return load_model("smollm2-135m")


class Served:
    """Rows with contexts of these lengths, their blocks one after the other in the pool."""

    def __init__(
        self,
        contexts: Sequence[int],
        buckets: Sequence[Bucket],
        *,
        variants: Sequence[Variant] = (Variant.GREEDY,),
    ) -> None:
        self._contexts = contexts
        per_row = [-(-context // BLOCK_SIZE) for context in contexts]
        self.executor = Real(
            config=smollm2().config,
            parameters=smollm2().parameters,
            limits=Limits(
                max_num_seqs=len(contexts),
                max_num_batched_tokens=max(len(contexts), *[b.num_tokens for b in buckets]),
                max_model_len=max(contexts),
                block_size=BLOCK_SIZE,
                num_blocks=1 + sum(per_row),
            ),
            buckets=Buckets(tuple(sorted(buckets))),
            fill=0.01,
        )
        self._blocks, first = [], 1
        for number in per_row:
            self._blocks.append(tuple(range(first, first + number)))
            first += number
        self.executor.warm_up(variants)
        self.enter(RowSampling())

    def enter(self, sampling: RowSampling) -> None:
        """From now on every row samples like this."""
        rows = range(len(self._contexts))
        plan = self.plan({0: 1})._replace(
            entries=tuple(RowEntry(r, r, self._contexts[r], sampling) for r in rows),
            table_writes=tuple(TableWrite(r, 0, self._blocks[r]) for r in rows),
        )
        self.run(plan)

    def plan(self, rows: Mapping[int, int]) -> StepPlan:
        """A step of the last so many tokens of these rows."""
        return StepPlan(
            step_id=1,
            rows=tuple(
                RowPlan(r, r, self._contexts[r] - num, num, 1, tuple(range(1000, 1000 + num)))
                for r, num in rows.items()
            ),
        )

    def run(self, plan: StepPlan) -> None:
        """Run a step to its end."""
        self.executor.submit(plan)
        self.executor.collect()


def make_floor(num_tokens: int, num_context_tokens: int) -> Callable[[], None]:
    """The arithmetic that a step of so many tokens, over so many in all contexts, cannot avoid."""
    config = smollm2().config
    weights = {name: jnp.asarray(array) for name, array in smollm2().parameters.items()}
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    kv = jnp.full(per_token * num_context_tokens, 0.01, jnp.float32)

    @jax.jit
    def products(weights: dict[str, jax.Array], x: jax.Array, kv: jax.Array) -> jax.Array:
        for i in range(config.num_layers):
            w = {name: weights[f"layers.{i}.{name}"] for name in ("q", "k", "v", "o")}
            mixed = jnp.concatenate([x @ w["k"], x @ w["v"]], axis=1)
            x = (x @ w["q"]).at[:, : mixed.shape[1]].add(mixed) @ w["o"]
            hidden = (x @ weights[f"layers.{i}.gate"]) + (x @ weights[f"layers.{i}.up"])
            x = hidden @ weights[f"layers.{i}.down"]
        logits = jnp.einsum("td,vd->tv", x, weights["embed"])
        return jnp.max(logits) + jnp.max(kv)

    x = jnp.full((num_tokens, config.hidden_size), 1e-3, jnp.float32)

    def run() -> None:
        products(weights, x, kv).block_until_ready()

    run()
    return run
