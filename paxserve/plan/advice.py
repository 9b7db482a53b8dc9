"""Which limits to serve with, by a stated rule.

Under every budget (max_num_batched_tokens) the most rows (max_num_seqs) with which

- the longest step, all rows decoding and the rest of the budget full of prompts, keeps the TPOT
  that was asked for, so that no request waits longer than that for a token;
- the pool holds all rows at their mean context, with `MOST_UTILIZATION` of what weights and that
  step leave;
- the budget has room for the prompts of those who follow, so that the batch stays full;

and of these pairs the one with the most output tokens per second, of equals the smaller budget.
Budgets are whole tiles of 128 tokens, or less than one; the rows under one are found by halving,
since every condition gets harder with rows. memory_utilization is then the least, in hundredths,
that holds these rows at their full length, so that none is preempted, or the most where memory does
not reach that far.

Owns: that rule. In: a `Setup`, a `Demand`. Out: `Advice`, or why there is none. Must not know: how
a step is costed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paxserve.plan import Demand, Setup
from paxserve.plan.memory import num_requests
from paxserve.plan.steps import Steps

BUDGETS = (16, 32, 64, *range(128, 8193, 128))
MOST_UTILIZATION = 0.95
KV, TPOT, BUDGET = "KV memory", "TPOT", "prompts in the budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Attributes:

    max_num_seqs, max_num_batched_tokens, memory_utilization: to set.
    vllm_memory_utilization: by vLLM's rule, of all memory, for as much KV.
    num_blocks: that the pool will have.
    limited_by: what one more row would break.
    tpot_s: the mean; longest_s: of the longest step.
    ttft_s: beside a full batch, waiting for the prompts before.
    output_tokens_per_s, requests_per_s: of all devices together.
    preempts: whether rows at their full length are more than the pool holds.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_utilization: float
    vllm_memory_utilization: float
    num_blocks: int
    limited_by: str
    tpot_s: float
    longest_s: float
    ttft_s: float | None
    output_tokens_per_s: float
    requests_per_s: float
    preempts: bool


def advise(setup: Setup, demand: Demand) -> Advice:
    """Follow the rule.

    Raises:
        ValueError: the model does not fit, or no limits keep the TPOT; the message says by how
            much the shortest step misses it.
    """
    steps = Steps(setup, demand)
    _check_can(setup, demand, steps)
    best: tuple[float, Setup, str] | None = None
    for budget in _budgets(setup):
        found = _most_rows(setup, demand, steps, budget)
        if found is None:
            continue
        rows, limited_by = found
        mean_s = steps.mean_s(rows, budget)
        assert mean_s is not None
        if best is None or rows / mean_s > best[0] * (1 + 1e-9):
            best = rows / mean_s, _limited(setup, rows, budget), limited_by
    if best is None:
        raise ValueError(
            f"no limits serve requests of {demand.input_tokens} and {demand.output_tokens} tokens "
            f"with steps of at most {demand.tpot_s * 1e3:g} ms on this hardware"
        )
    _, chosen, limited_by = best
    return _advice(chosen, demand, steps, limited_by)


def _check_can(setup: Setup, demand: Demand, steps: Steps) -> None:
    demand.check(setup.limits()[1])
    shortest_s = steps.decode_s(1)
    if shortest_s is not None and shortest_s > demand.tpot_s:
        raise ValueError(
            f"a TPOT of {demand.tpot_s * 1e3:g} ms cannot be kept: a step of one request takes "
            f"{shortest_s * 1e3:.3g} ms: take more or faster devices, or a smaller model"
        )


def _budgets(setup: Setup) -> Iterable[int]:
    """Where prompts are not split, a step must have room for the longest."""
    if not setup.whole_prompts:
        return BUDGETS
    least = setup.limits()[1].max_model_len
    return [least, *[budget for budget in BUDGETS if budget > least]]


def _most_rows(setup: Setup, demand: Demand, steps: Steps, budget: int) -> tuple[int, str] | None:
    """The most rows under a budget, and what forbids one more."""
    if _why_not(setup, demand, steps, 1, budget) is not None:
        return None
    low, high, why = 1, budget + 1, BUDGET
    while high - low > 1:
        middle = (low + high) // 2
        refusal = _why_not(setup, demand, steps, middle, budget)
        if refusal is None:
            low = middle
        else:
            high, why = middle, refusal
    return low, why


def _why_not(setup: Setup, demand: Demand, steps: Steps, rows: int, budget: int) -> str | None:
    """The condition that does not hold."""
    if rows + steps.new_tokens(rows) > budget:
        return BUDGET
    longest_s = steps.longest_s(rows, budget)
    if longest_s is None or longest_s > demand.tpot_s or steps.mean_s(rows, budget) is None:
        return TPOT
    try:
        limits = _limited(setup, rows, budget).limits()[1]
    except ValueError:  # weights and a step of this size leave no block
        return KV
    return None if num_requests(limits, demand.mean_context) >= rows else KV


def _limited(setup: Setup, rows: int, budget: int) -> Setup:
    return setup.with_settings(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        memory_utilization=MOST_UTILIZATION,
        kv_cache_memory_bytes=None,
        num_blocks_override=None,
        num_slots_override=None,
    )


def _advice(chosen: Setup, demand: Demand, steps: Steps, limited_by: str) -> Advice:
    size, limits = chosen.limits()
    rows, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    preempts = num_requests(limits, demand.full_context) < rows
    weights, step = chosen.part.weight_bytes, chosen.step_bytes(limits)
    utilization = MOST_UTILIZATION
    if not preempts:
        wanted = 1 + rows * -(-demand.full_context // limits.block_size)
        spare = chosen.hardware.usable_bytes - weights - step
        utilization = max(0.01, math.ceil(100 * wanted * size.bytes_per_block / spare) / 100)
    size, limits = chosen.with_settings(memory_utilization=utilization).limits()
    mean_s, longest_s = steps.mean_s(rows, budget), steps.longest_s(rows, budget)
    assert mean_s is not None
    assert longest_s is not None
    return Advice(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        memory_utilization=utilization,
        vllm_memory_utilization=round(
            (weights + step + size.num_bytes) / chosen.hardware.memory_bytes, 3
        ),
        num_blocks=limits.num_blocks,
        limited_by=limited_by,
        tpot_s=mean_s,
        longest_s=longest_s,
        ttft_s=steps.ttft_s(rows, budget),
        output_tokens_per_s=rows / mean_s,
        requests_per_s=rows / mean_s / demand.output_tokens,
        preempts=preempts,
    )
