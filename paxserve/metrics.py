"""Metrics: one definition each.

Owns: what every figure means. In: requests, step records and slot counts of a run, or columns of
them. Out: a `RequestRecord` per request; one flat summary, in the field names of `vllm bench serve`
where it has the figure. Seconds inside; `_ms` only in the summary. Must not know: files.

    arrival        first scheduled      first token        ...        last token = finish
       |---- queue_time ---|                 |                             |
       |-------------- ttft ----------------|--- itl ---|--- itl ---| ... |
       |------------------------------ e2e -------------------------------|

    tpot = (e2e - ttft) / (num_output_tokens - 1), undefined for one token; ttft + sum(itl) = e2e;
    normalized latency = e2e / num_output_tokens (vLLM paper). The first token is the first ever:
    a preemption does not reset it. With several sequences, ttft is the first token of any, e2e the
    last of all, tpot their mean, and lengths count per sequence in the normalized latency.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paxserve.histogram import Distribution, Exact
from paxserve.ledger import SlotCounts
from paxserve.records import StepLog, StepRecord
from paxserve.request import FinishReason, Request

type Summary = dict[str, float | int | None]

PERCENTILES = (50, 90, 99)
COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


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


LISTS = ("itl_s", "output_token_ids")  # the fields that grow with the output


def request_record(request: Request) -> RequestRecord:
    """Figures of one request."""
    return scalars_of(request)._replace(
        itl_s=tuple(gaps_of(request).tolist()), output_token_ids=tuple(request.output_token_ids)
    )


def gaps_of(request: Request) -> np.ndarray:
    """The itl of all its sequences, one after the other, in seconds."""
    gaps = [np.diff(sequence.token_times_s) for sequence in request.sequences]
    return gaps[0] if len(gaps) == 1 else np.concatenate(gaps)


def scalars_of(request: Request) -> RequestRecord:
    """Figures of one request, `LISTS` left empty."""
    times = [s.token_times_s for s in request.sequences if s.token_times_s]
    num_output, arrival_s = request.num_output_tokens, request.arrival_s
    ttft_s = min([own[0] for own in times]) - arrival_s if times else None
    e2e_s = max([own[-1] for own in times]) - arrival_s if times else None
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
        tpot_s=sum(tpots_s) / len(tpots_s) if tpots_s else None,
        e2e_s=e2e_s,
        normalized_latency_s=None if e2e_s is None else e2e_s * len(times) / num_output,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.num_recomputed_tokens,
        itl_s=(),
        output_token_ids=(),
        num_sequences=len(request.sequences),
        num_cached_tokens=request.num_hit_tokens,
        client=request.origin.client,
        priority=request.origin.priority,
        live_slot_s=request.live_slot_s,
        promised_slot_s=request.promised_slot_s,
        held_slot_s=request.held_slot_s,
    )


class RequestColumns(NamedTuple):
    """What a summary needs of the requests of a run, in order of arrival.

    fields: of `RequestRecord`, each for all requests, NaN where a figure is undefined. gaps_s: the
    sum of each one's itl. itl: of the completed ones.
    """

    fields: Mapping[str, np.ndarray]
    gaps_s: np.ndarray
    itl: Distribution


def request_columns(requests: Iterable[Request]) -> RequestColumns:
    """From requests that are all kept."""
    requests = list(requests)
    records = [scalars_of(request) for request in requests]
    gaps = [gaps_of(request) for request in requests]
    of_completed = [g for g, r in zip(gaps, records, strict=True) if r.finish_reason in COMPLETED]
    return RequestColumns(
        fields={name: _column([getattr(r, name) for r in records]) for name in SUMMED},
        gaps_s=np.array([own.sum() for own in gaps], np.float64),
        itl=Exact(np.concatenate([np.zeros(0), *of_completed])),
    )


SUMMED = (
    "finish_reason",
    "arrival_s",
    "num_prompt_tokens",
    "num_output_tokens",
    "queue_time_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "normalized_latency_s",
    "num_preemptions",
    "num_recomputed_tokens",
)  # the fields that a summary is made of


def _column(values: Sequence[str | float | None]) -> np.ndarray:
    is_text = any(isinstance(value, str) for value in values)
    return np.array(values, object if is_text else np.float64)


def summarize(
    requests: Iterable[Request], steps: Sequence[StepRecord], slots: Sequence[SlotCounts]
) -> Summary:
    """All figures of a run, flat; see `summarize_columns`."""
    log = steps if isinstance(steps, StepLog) else StepLog(steps)
    return summarize_columns(request_columns(requests), log, _classes(slots))


def summarize_columns(requests: RequestColumns, steps: StepLog, slots: np.ndarray) -> Summary:
    """All figures of a run, flat; `slots` are [steps, classes of `SlotCounts`].

    Tokens, rates and latencies are those of completed requests (ended by stop or length), as
    `vllm bench serve` has it; what aborted and failed ones produced is a figure of its own.
    Rates are over `duration`: from the first arrival to the end of the last step.
    """
    fields, durations_s = requests.fields, steps.column("duration_s")
    duration_s = 0.0
    if len(steps):
        end_s = float(steps.column("start_s")[-1] + durations_s[-1])
        duration_s = end_s - float(fields["arrival_s"].min())
    is_completed = np.isin(fields["finish_reason"].astype(str), COMPLETED)
    completed = {name: column[is_completed] for name, column in fields.items()}
    num_completed = int(is_completed.sum())
    num_input = int(completed["num_prompt_tokens"].sum())
    num_output = int(completed["num_output_tokens"].sum())
    summary: Summary = {
        "num_requests": len(is_completed),
        "completed": num_completed,
        "failed": int((fields["finish_reason"] == FinishReason.ERROR.value).sum()),
        "duration": duration_s,
        "busy_share": float(durations_s.sum()) / duration_s if duration_s > 0 else None,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "output_tokens_of_others": int(fields["num_output_tokens"].sum()) - num_output,
        "request_throughput": _rate(num_completed, duration_s),
        "output_throughput": _rate(num_output, duration_s),
        "total_token_throughput": _rate(num_input + num_output, duration_s),
    }
    summary |= _spread("ttft", completed["ttft_s"])
    summary |= _spread("tpot", completed["tpot_s"])
    summary |= _spread_of("itl", requests.itl, float(requests.gaps_s[is_completed].sum()))
    summary |= _spread("e2el", completed["e2e_s"])
    summary |= _spread("queue_time", completed["queue_time_s"])
    normalized = completed["normalized_latency_s"]
    normalized = normalized[~np.isnan(normalized)]
    summary["mean_normalized_latency_s_per_token"] = (
        float(np.mean(normalized)) if len(normalized) else None
    )
    return summary | _memory(fields, steps, slots) | _device(steps)


def slot_shares(steps: Sequence[StepRecord], slots: Sequence[SlotCounts]) -> dict[str, float]:
    """Share of the usable pool in each slot class, weighted by step time; empty without steps."""
    return _shares(np.array([step.duration_s for step in steps], np.float64), _classes(slots))


def _classes(slots: Sequence[SlotCounts]) -> np.ndarray:
    return np.array(slots, np.int64).reshape(-1, len(SlotCounts._fields))


def _shares(durations_s: np.ndarray, slots: np.ndarray) -> dict[str, float]:
    num_steps = len(durations_s)
    if not num_steps:
        return {}
    total_s = durations_s.sum()
    weights = durations_s / total_s if total_s else np.full(num_steps, 1 / num_steps)
    num_usable = _num_usable(slots)
    means = [float(weights @ of_class) / num_usable for of_class in slots.T]
    shares = dict(zip(SlotCounts._fields, means, strict=True))
    del shares["null"]
    return shares


def _num_usable(slots: np.ndarray) -> int:
    return int(slots[0].sum() - slots[0][SlotCounts._fields.index("null")])


def _memory(fields: Mapping[str, np.ndarray], steps: StepLog, slots: np.ndarray) -> Summary:
    total = _totals(steps)
    num_recomputed = int(fields["num_recomputed_tokens"].sum())
    durations_s = steps.column("duration_s")
    summary: Summary = {
        "mean_running_requests": float(np.average(steps.column("num_running"), weights=durations_s))
        if durations_s.sum()
        else None,
        "num_preemptions": int(fields["num_preemptions"].sum()),
        "recomputed_tokens": num_recomputed,
        "recomputed_share_of_computed_tokens": _share(num_recomputed, total["num_tokens"]),
        "kv_pool_tokens": _num_usable(slots) if len(slots) else None,
        "prefix_hit_tokens": total["num_cached_tokens"],
        "prefix_hit_rate": _share(total["num_cached_tokens"], total["num_entered_tokens"]),
        "evicted_blocks": total["num_evicted"],
        "copied_blocks": total["num_copied"],
        "swapped_out_blocks": total["num_swapped_out"],
        "swap_bytes": total["swap_bytes"],
    }
    shares = _shares(durations_s, slots)
    return summary | {f"kv_share_{name}": share for name, share in shares.items()}


def _device(steps: StepLog) -> Summary:
    total = _totals(steps)
    summary: Summary = {"num_steps": len(steps), "computed_tokens": total["num_tokens"]}
    for name in ("token", "row", "block"):
        share = _share(total[f"num_{name}s"], total[f"padded_{name}s"])
        summary[f"padded_{name}_share"] = None if share is None else 1 - share
    summary |= {
        "num_compiles": total["num_compiles"],
        "compile_s": float(steps.column("compile_s").sum()),
    }
    return summary | _spread("step_time", steps.column("duration_s"))


def _totals(steps: StepLog) -> dict[str, int]:
    return {name: int(steps.column(name).sum()) for name in steps.counts}


def _spread(name: str, values_s: np.ndarray) -> Summary:
    """Of the values that are not NaN."""
    known = values_s[~np.isnan(values_s)]
    return _spread_of(name, Exact(known), float(known.sum()))


def _spread_of(name: str, values_s: Distribution, sum_s: float) -> Summary:
    if not values_s.count:
        empty: Summary = {f"mean_{name}_ms": None, f"median_{name}_ms": None}
        return empty | {f"p{p}_{name}_ms": None for p in PERCENTILES}
    spread: Summary = {
        f"mean_{name}_ms": 1000 * sum_s / values_s.count,
        f"median_{name}_ms": 1000 * values_s.percentile(50),
    }
    return spread | {f"p{p}_{name}_ms": 1000 * values_s.percentile(p) for p in PERCENTILES}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
