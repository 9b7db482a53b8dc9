"""Metrics: one definition each.

Owns: what every figure means. In: requests, step records and slot counts of a run. Out: a
`RequestMetrics` per request, one flat summary whose field names are those of `vllm bench serve`
where it has the figure. Seconds inside; `_ms` only in the summary. Must not know: files, tables.

    arrival        first scheduled      first token        ...        last token = finish
       |---- queue_time ---|                 |                             |
       |-------------- ttft ----------------|--- itl ---|--- itl ---| ... |
       |------------------------------ e2e -------------------------------|

    tpot = (e2e - ttft) / (num_output_tokens - 1), undefined for one token; ttft + sum(itl) = e2e;
    normalized latency = e2e / num_output_tokens (vLLM paper). The first token is the first ever:
    a preemption does not reset it. With several sequences, ttft is the first token of any, e2e the
    last of all, tpot their mean, and lengths count per sequence in the normalized latency.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paxserve.ledger import SlotCounts
from paxserve.records import StepRecord
from paxserve.request import FinishReason, Request

type Summary = dict[str, float | int | None]

PERCENTILES = (50, 90, 99)


class RequestRecord(NamedTuple):
    """One request; None where a figure is undefined."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str | None
    error: str | None
    arrival_s: float
    queue_time_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    normalized_latency_s: float | None
    num_preemptions: int
    num_recomputed_tokens: int
    itl_s: tuple[float, ...]
    output_token_ids: tuple[int, ...]
    num_sequences: int
    num_cached_tokens: int
    client: str
    priority: int
    live_slot_s: float
    promised_slot_s: float
    held_slot_s: float


def request_record(request: Request) -> RequestRecord:
    """Figures of one request."""
    times = [s.token_times_s for s in request.sequences if s.token_times_s]
    num_output, arrival_s = request.num_output_tokens, request.arrival_s
    ttft_s = min(own[0] for own in times) - arrival_s if times else None
    e2e_s = max(own[-1] for own in times) - arrival_s if times else None
    tpots_s = [(own[-1] - own[0]) / (len(own) - 1) for own in times if len(own) > 1]
    queue_s = request.first_scheduled_s
    return RequestRecord(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=num_output,
        finish_reason=request.finish_reason and request.finish_reason.value,
        error=request.error,
        arrival_s=arrival_s,
        queue_time_s=None if queue_s is None else queue_s - arrival_s,
        ttft_s=ttft_s,
        tpot_s=float(np.mean(tpots_s)) if tpots_s else None,
        e2e_s=e2e_s,
        normalized_latency_s=None if e2e_s is None else e2e_s * len(times) / num_output,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.num_recomputed_tokens,
        itl_s=tuple([gap for own in times for gap in np.diff(own).tolist()]),
        output_token_ids=tuple(request.output_token_ids),
        num_sequences=len(request.sequences),
        num_cached_tokens=request.num_hit_tokens,
        client=request.origin.client,
        priority=request.origin.priority,
        live_slot_s=request.live_slot_s,
        promised_slot_s=request.promised_slot_s,
        held_slot_s=request.held_slot_s,
    )


def summarize(
    requests: Iterable[Request], steps: Sequence[StepRecord], slots: Sequence[SlotCounts]
) -> Summary:
    """All figures of a run, flat.

    Tokens, rates and latencies are those of completed requests (ended by stop or length), as
    `vllm bench serve` has it; what aborted and failed ones produced is a figure of its own.
    Rates are over `duration`: from the first arrival to the end of the last step.
    """
    records = [request_record(request) for request in requests]
    duration_s = 0.0
    if steps:
        duration_s = steps[-1].start_s + steps[-1].duration_s - min(r.arrival_s for r in records)
    completed = [r for r in records if r.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
    num_input = sum(r.num_prompt_tokens for r in completed)
    num_output = sum(r.num_output_tokens for r in completed)
    summary: Summary = {
        "num_requests": len(records),
        "completed": len(completed),
        "failed": sum(r.finish_reason == FinishReason.ERROR for r in records),
        "duration": duration_s,
        "busy_share": sum(s.duration_s for s in steps) / duration_s if duration_s > 0 else None,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "output_tokens_of_others": sum(r.num_output_tokens for r in records) - num_output,
        "request_throughput": _rate(len(completed), duration_s),
        "output_throughput": _rate(num_output, duration_s),
        "total_token_throughput": _rate(num_input + num_output, duration_s),
    }
    summary |= _spread("ttft", [r.ttft_s for r in completed])
    summary |= _spread("tpot", [r.tpot_s for r in completed])
    summary |= _spread("itl", [gap for r in completed for gap in r.itl_s])
    summary |= _spread("e2el", [r.e2e_s for r in completed])
    summary |= _spread("queue_time", [r.queue_time_s for r in completed])
    normalized = [r.normalized_latency_s for r in completed if r.normalized_latency_s is not None]
    summary["mean_normalized_latency_s_per_token"] = (
        float(np.mean(normalized)) if normalized else None
    )
    return summary | _memory(records, steps, slots) | _device(steps)


def slot_shares(steps: Sequence[StepRecord], slots: Sequence[SlotCounts]) -> dict[str, float]:
    """Share of the usable pool in each slot class, weighted by step time; empty without steps."""
    if not steps:
        return {}
    weights = np.array([step.duration_s for step in steps])
    weights = weights / weights.sum() if weights.sum() else np.full(len(steps), 1 / len(steps))
    usable = sum(slots[0]) - slots[0].null
    means = weights @ np.array(slots, np.float64) / usable
    shares = dict(zip(SlotCounts._fields, means.tolist(), strict=True))
    del shares["null"]
    return shares


def _memory(
    records: Sequence[RequestRecord], steps: Sequence[StepRecord], slots: Sequence[SlotCounts]
) -> Summary:
    num_computed = sum(step.num_tokens for step in steps)
    num_recomputed = sum(r.num_recomputed_tokens for r in records)
    weights = [step.duration_s for step in steps]
    running = [step.num_running for step in steps]
    summary: Summary = {
        "mean_running_requests": float(np.average(running, weights=weights))
        if sum(weights)
        else None,
        "num_preemptions": sum(r.num_preemptions for r in records),
        "recomputed_tokens": num_recomputed,
        "recomputed_share_of_computed_tokens": num_recomputed / num_computed
        if num_computed
        else None,
    }
    num_entered = sum(step.num_entered_tokens for step in steps)
    num_cached = sum(step.num_cached_tokens for step in steps)
    summary |= {
        "prefix_hit_tokens": num_cached,
        "prefix_hit_rate": num_cached / num_entered if num_entered else None,
        "evicted_blocks": sum(step.num_evicted for step in steps),
        "copied_blocks": sum(step.num_copied for step in steps),
        "swapped_out_blocks": sum(step.num_swapped_out for step in steps),
        "swap_bytes": sum(step.swap_bytes for step in steps),
    }
    shares = slot_shares(steps, slots)
    return summary | {f"kv_share_{name}": share for name, share in shares.items()}


def _device(steps: Sequence[StepRecord]) -> Summary:
    num_tokens = sum(step.num_tokens for step in steps)
    padded_tokens = sum(step.padded_tokens for step in steps)
    num_rows, padded_rows = sum(s.num_rows for s in steps), sum(s.padded_rows for s in steps)
    num_blocks, padded_blocks = (
        sum(s.num_blocks for s in steps),
        sum(s.padded_blocks for s in steps),
    )
    summary: Summary = {
        "num_steps": len(steps),
        "computed_tokens": num_tokens,
        "padded_token_share": 1 - num_tokens / padded_tokens if padded_tokens else None,
        "padded_row_share": 1 - num_rows / padded_rows if padded_rows else None,
        "padded_block_share": 1 - num_blocks / padded_blocks if padded_blocks else None,
        "num_compiles": sum(step.num_compiles for step in steps),
        "compile_s": sum(step.compile_s for step in steps),
    }
    return summary | _spread("step_time", [step.duration_s for step in steps])


def _spread(name: str, values: Sequence[float | None]) -> Summary:
    known = [1000 * value for value in values if value is not None]
    if not known:
        empty: Summary = {f"mean_{name}_ms": None, f"median_{name}_ms": None}
        return empty | {f"p{p}_{name}_ms": None for p in PERCENTILES}
    spread: Summary = {
        f"mean_{name}_ms": float(np.mean(known)),
        f"median_{name}_ms": float(np.median(known)),
    }
    return spread | {f"p{p}_{name}_ms": float(np.percentile(known, p)) for p in PERCENTILES}


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
