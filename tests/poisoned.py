"""A real executor in harsh conditions: before every step, each block that nobody holds is filled
with NaN, so whoever reads what it was not given gets no finite logits. A step takes a fixed time,
so that policies which look at time decide the same on every machine.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from real_builders import NAN

from paxserve.engine import Engine
from paxserve.executor.real import Real
from paxserve.step import StepPlan, StepResult


@partial(jax.jit, donate_argnums=0)
def _fill(kv_blocks: tuple[jax.Array, ...], mask: jax.Array) -> tuple[jax.Array, ...]:
    mask = mask.reshape(-1, *[1] * (kv_blocks[0].ndim - 1))
    return tuple([jnp.where(mask, kv.dtype.type(NAN), kv) for kv in kv_blocks])


def poison_all(real: Real, block_ids: set[int]) -> None:
    """NaN in these blocks, whatever their number, by one program."""
    mask = np.isin(np.arange(real.num_device_blocks), list(block_ids))
    real._set_kv(_fill(real.kv_blocks, mask))


@dataclass
class Poisoned:
    """`inner` must be the only executor of `engine`; `plans` are those it was given.

    `num_poisoned` are blocks that were swapped out and filled with NaN before they came back.
    """

    inner: Real
    step_s: float = 0.02
    engine: Engine | None = None
    plans: list[StepPlan] = field(default_factory=list)
    swapped: dict[int, int] = field(default_factory=dict)
    num_poisoned: int = 0

    def attach(self, engine: Engine) -> Engine:
        """From now on, what this engine does not hold is poisoned."""
        engine.executor, self.engine = self, engine
        poison_all(self.inner, set(range(self.inner.num_device_blocks)))
        return engine

    def submit(self, plan: StepPlan) -> None:
        leaving = {copy.source for copy in (*plan.swap_out, *plan.copies)}
        idle = self._unheld() - leaving
        poison_all(self.inner, idle)
        self.num_poisoned += len({b for b in idle if b in self.swapped})
        self.swapped = {b: h for b, h in self.swapped.items() if b not in idle}
        self.swapped |= {copy.source: copy.target for copy in plan.swap_out}
        self.plans.append(plan)
        self.inner.submit(plan)

    def collect(self) -> StepResult:
        return self.inner.collect()._replace(duration_s=self.step_s)

    def reset(self) -> None:
        self.inner.reset()

    def _unheld(self) -> set[int]:
        assert self.engine is not None
        batch = self.engine.scheduler.batch
        tables = [s.block_table for r in batch.requests.values() for s in r.sequences]
        held = {block_id for table in tables for block_id in table}
        return set(range(self.inner.num_device_blocks)) - held - set(batch.pool.cached)
