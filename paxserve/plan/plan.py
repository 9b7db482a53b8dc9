"""A whole plan: memory, steps over batch sizes, advice, alternatives.

Owns: which questions are asked. In: a `Setup`, a `Demand`. Out: `Plan`, plain data. Must not know:
how it is shown.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from paxserve.cost_model import CostModel
from paxserve.plan import Demand, Setup
from paxserve.plan.advice import Advice, advise
from paxserve.plan.memory import MemoryPlan, memory_plan, num_requests, whole_memory
from paxserve.plan.steps import BatchPlan, Steps
from paxserve.plan.what_if import Variant, variants

MOST_ROWS = 4096  # of the batches that are looked at, unless more are asked for or advised


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Attributes:

    hardware, num_devices, dtype, kv_cache_dtype, num_weights: what serves what.
    cost_model: its settings, and its class as `class`.
    demand: what is expected of requests.
    memory: of each device.
    ridge: FLOP per byte of the hardware above which arithmetic is the bound.
    rows_at_ridge: decodes that reach it, were there no KV to read.
    rows_at_ridge_with_kv: the same at the mean context; None: no batch does.
    ttft_s: of a request alone.
    batches: over their sizes.
    advice: None with `advice_refusal` where no limits keep the TPOT.
    variants: the same setup first.
    """

    hardware: str
    num_devices: int
    num_weights: int
    dtype: str
    kv_cache_dtype: str
    cost_model: Mapping[str, Any]
    demand: Demand
    memory: MemoryPlan
    ridge: float
    rows_at_ridge: int | None
    rows_at_ridge_with_kv: int | None
    ttft_s: float | None
    batches: tuple[BatchPlan, ...]
    advice: Advice | None
    advice_refusal: str | None
    variants: tuple[Variant, ...]


def make_plan(setup: Setup, demand: Demand) -> Plan:
    """Answer every question.

    Raises:
        ValueError: the model does not fit, requests are longer than it takes, or the cost model
            has no answer for the target; the message has the numbers.
    """
    memory, steps = memory_plan(setup), Steps(setup, demand)
    demand.check(setup.limits()[1])
    advice, refusal = None, None
    try:
        advice = advise(setup, demand)
    except ValueError as error:
        refusal = str(error)
    most = num_requests(whole_memory(setup), demand.mean_context)
    shown = min(most, MOST_ROWS)
    sizes = {memory.max_num_seqs, shown, *([] if advice is None else [advice.max_num_seqs])}
    sizes |= {2**n for n in range(max(1, shown).bit_length())}
    return Plan(
        hardware=setup.hardware.name,
        num_devices=setup.num_devices,
        num_weights=setup.model.num_weights,
        dtype=setup.model.dtype,
        kv_cache_dtype=setup.settings.kv_cache_dtype,
        cost_model=_described(setup.cost_model),
        demand=demand,
        memory=memory,
        ridge=setup.hardware.ridge(setup.model.dtype),
        rows_at_ridge=steps.rows_at_ridge(0),
        rows_at_ridge_with_kv=steps.rows_at_ridge(demand.mean_context),
        ttft_s=steps.prompt_s(0, memory.max_num_batched_tokens),
        batches=tuple(
            steps.batch(size, budget=memory.max_num_batched_tokens, fits=size <= most)
            for size in sorted(sizes - {0})
        ),
        advice=advice,
        advice_refusal=refusal,
        variants=tuple(variants(setup, demand)),
    )


def _described(cost_model: CostModel) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if is_dataclass(cost_model) and not isinstance(cost_model, type):
        settings = asdict(cost_model)
    return {"class": type(cost_model).__name__, **settings}
