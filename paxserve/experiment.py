"""One run, from settings to results.

Owns: the order build -> check that every setting is read -> warm up -> serve -> measure. In: plain
settings and the choices made per group. Out: a `Run`. Must not know: Hydra, files, tables.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paxserve.clock import VirtualClock
from paxserve.compose import (
    COST_MODEL,
    GATE,
    POLICY_AXES,
    WORKLOAD_AXES,
    dotted,
    load_policies,
    load_workload,
)
from paxserve.engine import Engine
from paxserve.engines import Made, make_engine
from paxserve.folded import FoldedRequests
from paxserve.intake import InvalidRequest
from paxserve.metrics import Summary, request_columns, summarize_columns
from paxserve.notices import Say
from paxserve.pack import variant_of
from paxserve.policies import Policies
from paxserve.sampling_params import SamplingParams
from paxserve.serve import serve
from paxserve.service_level import RequestBounds
from paxserve.settings import Knobs, from_section
from paxserve.tracking import Tracking
from paxserve.workload import Arrival, Source, Vocabulary, Workload

type Progress = Callable[[str, int, int], None]

RECORDS = ("full", "compact")
# Settings of what a run leaves behind; who only compares runs does not give them to `prepare`.
WRITTEN_DOWN = ("record", "record_blocks", "goodput")


class ServingFailed(RuntimeError):
    """The engine or a policy failed on requests and settings that had been accepted."""


class NothingCompleted(RuntimeError):
    """Every request was refused or failed; the message has the first reason of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run before its first request: everything is built and checked, nothing is warmed up.

    `open_source` opens the workload once more: the same arrivals, none of them taken.
    """

    made: Made
    source: Source
    params: SamplingParams
    bounds: RequestBounds
    open_source: Callable[[], Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run leaves. `warm_up_s` is outside the measured time; `num_executables` were built;
    `device` is the kind of device, None without one. `start_s`: when arrivals began to be counted,
    on the engine's clock.
    """

    engine: Engine
    refused: list[tuple[Arrival, InvalidRequest]]
    summary: Summary
    warm_up_s: float
    num_executables: int
    device: str | None
    start_s: float = 0.0


def run(
    config: Mapping[str, Any],
    *,
    choices: Mapping[str, str],
    explicit: Iterable[str],
    say: Say,
    progress: Progress,
    policies: Mapping[str, object] | None = None,
    workload: Workload | None = None,
    tracking: Tracking | None = None,
) -> Run:
    """Run one experiment.

    Args:
        config: group -> key -> value, `seed`; `record_blocks`: keep the log of blocks; `record`:
            full, or compact (see `folded.py`).
        choices: group -> the name that was chosen for it.
        explicit: what the user set, as `group`, `group.key`, or a key of no group; what config
            lacks of these is not read.
        say: receives messages for people.
        progress: called with (what, done, total).
        policies: axis -> a policy object, in place of what was chosen for that axis; `cost_model`
            is one where the executor is simulated.
        workload: in place of the one that was chosen.
        tracking: whom to tell how it goes.

    Raises:
        ValueError: settings that are wrong, do not go together, or that nothing reads.
        FileNotFoundError, ModuleNotFoundError: no such model or workload here.
        NotImplementedError: a kernel that does not exist yet.
        ServingFailed: anything that goes wrong after all of that was accepted.
    """
    prepared = prepare(
        config, choices=choices, explicit=explicit, say=say, policies=policies, workload=workload
    )
    try:
        return serve_prepared(prepared, say, progress, tracking)
    except Exception as error:
        raise ServingFailed(f"{type(error).__name__} while serving: {error}") from error


def prepare(
    config: Mapping[str, Any],
    *,
    choices: Mapping[str, str],
    explicit: Iterable[str],
    say: Say,
    policies: Mapping[str, object] | None = None,
    workload: Workload | None = None,
) -> Prepared:
    """Everything of `run` before the first request; arguments and errors are those of `run`."""
    knobs = Knobs(config, explicit)
    for key in ("seed", "record", "record_blocks"):
        if key in config:
            knobs.chosen(key)
    seed = config.get("seed", 0)
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}")
    logs_blocks = config.get("record_blocks", False)
    if not isinstance(logs_blocks, bool):
        raise ValueError(f"record_blocks must be true or false, got {logs_blocks!r}")
    bounds = from_section(RequestBounds, knobs.section("goodput"))
    record = config.get("record", "full")
    if record not in RECORDS:
        raise ValueError(f"record must be one of {', '.join(RECORDS)}, got {record!r}")
    if record == "compact" and logs_blocks:
        raise ValueError("record=compact keeps no history, and record_blocks=true is one")
    own = dict(policies or {})
    own_cost_model = own.pop(COST_MODEL, None)
    composed = _policies(knobs, choices, own)
    if workload is None:
        workload = _workload(knobs, choices)
    params = _sampling(
        knobs,
        has_model=choices["executor"] == "real",
        has_lengths=getattr(workload, "forces_lengths", False),
    )
    made = make_engine(
        choices["executor"],
        knobs,
        composed,
        choices=choices,
        seed=seed,
        say=say,
        logs_blocks=logs_blocks,
        forks=params.num_sequences > 1,
        folded=FoldedRequests() if record == "compact" else None,
        own_cost_model=own_cost_model,
        sampling=variant_of(params).value,
    )
    knobs.check_all_read()
    tokenizer = made.tokenizer
    vocabulary = Vocabulary(made.vocab_size, None if tokenizer is None else tokenizer.encode)
    open_source = partial(workload.open, seed=seed, vocabulary=vocabulary)
    return Prepared(
        made=made,
        source=open_source(),
        params=params,
        bounds=bounds,
        open_source=open_source,
    )


def serve_prepared(
    prepared: Prepared, say: Say, progress: Progress, tracking: Tracking | None = None
) -> Run:
    """Warm up, serve all that comes, measure."""
    engine, source = prepared.made.engine, prepared.source
    warm_up_s, num_executables = warm_up(engine, prepared.params, progress)
    if num_executables:
        say(f"warm-up: {num_executables} executables in {warm_up_s:.1f} s")
    ended, start_s = 0, engine.clock.now_s()

    def on_ended(number: int) -> None:
        nonlocal ended
        ended += number
        progress("requests", ended, source.num_requests)

    started_s = time.perf_counter()
    refused = serve(
        engine,
        source,
        prepared.params,
        tokenizer=prepared.made.tokenizer,
        on_ended=on_ended,
        on_step=None if tracking is None else lambda: tracking.after_step(engine, ended),
    )
    if isinstance(engine.clock, VirtualClock):
        say(cost_line(engine, time.perf_counter() - started_s))
    engine.fold()
    folded = engine.folded
    requests = request_columns(engine.requests) if folded is None else folded.columns()
    summary = summarize_columns(requests, engine.steps, engine.ledger.columns())
    duration_s = float(summary["duration"] or 0)
    num_sent = len(requests.gaps_s) + len(refused)
    extra: Summary = {
        **prepared.bounds.goodput(requests.fields, num_sent=num_sent, duration_s=duration_s),
        "num_refused": len(refused),
        "warm_up_s": warm_up_s,
        "num_executables": num_executables,
        "leapt_steps": engine.num_leapt_steps,
    }
    return Run(
        engine=engine,
        refused=refused,
        summary=summary | extra,
        warm_up_s=warm_up_s,
        num_executables=num_executables,
        device=prepared.made.device,
        start_s=start_s,
    )


def nothing_completed(done: Run) -> NothingCompleted | None:
    """Why a run has nothing to show; None if any request was completed."""
    if done.summary["completed"]:
        return None
    refused, errors = [str(why) for _, why in done.refused], errors_of(done.engine)
    num_failed = int(done.summary["failed"] or 0)
    reasons = [
        f"{number} of {len(refused) + num_failed} {what}, the first because {first[0]}"
        for number, what, first in (
            (len(refused), "refused", refused),
            (num_failed, "failed", errors),
        )
        if first
    ]
    return NothingCompleted(f"no request was completed: {'; '.join(reasons) or 'there was none'}")


def errors_of(engine: Engine) -> list[str]:
    """Of the requests that failed; the first of them where they were not kept."""
    if engine.folded is not None:
        return engine.folded.errors
    return [request.error for request in engine.requests if request.error is not None]


def cost_line(engine: Engine, wall_s: float) -> str:
    """What a run in virtual time cost on this machine. A token is one that was computed."""
    num_steps, num_tokens = len(engine.steps), int(engine.steps.column("num_tokens").sum())
    per_step, per_token = (1e6 * wall_s / max(1, num) for num in (num_steps, num_tokens))
    leapt = f", {engine.num_leapt_steps} of them leapt" if engine.num_leapt_steps else ""
    return (
        f"{num_steps} steps{leapt} and {num_tokens} tokens in {wall_s:.1f} s: "
        f"{per_step:.0f} us per step, {per_token:.2f} us per token"
    )


def _workload(knobs: Knobs, choices: Mapping[str, str]) -> Workload:
    axes = [axis for axis in WORKLOAD_AXES if axis in choices]
    for axis in axes:
        knobs.chosen(dotted(axis))
    return load_workload(choices, {axis: knobs.section(dotted(axis)) for axis in axes})


def _policies(knobs: Knobs, choices: Mapping[str, str], own: Mapping[str, object]) -> Policies:
    """What is set for an axis that has a policy object stays unread, and so does what the other
    choices leave without a use.
    """
    named = filter(None, choices.get(GATE, "").split(","))
    gates = [f"{GATE}.{name.rpartition(':')[2]}" for name in named]
    settings = {axis: knobs.plain(axis) for axis in (*POLICY_AXES, *gates)}
    policies = load_policies(choices, settings, own=own)
    unused = set(own) | policies.unread(
        is_forced=bool(knobs.plain("limits").get("preempt_every_steps"))
    )
    for axis in (*POLICY_AXES, GATE):
        if axis not in unused:
            knobs.used(axis)
    return policies


def _sampling(knobs: Knobs, *, has_model: bool, has_lengths: bool) -> SamplingParams:
    """Greedy sampling reads none of the filters; only a model gives log-probabilities; a workload
    that knows its lengths forces them.
    """
    section = knobs.section("sampling")
    knobs.chosen("sampling")
    is_greedy = section.get("temperature", 1.0) == 0
    unread: tuple[str, ...] = ("top_k", "top_p", "min_p", "seed") if is_greedy else ()
    unread += () if has_model else ("logprobs",)
    unread += () if section.get("beam_width") else ("length_penalty",)
    unread += ("max_tokens", "ignore_eos") if has_lengths else ()
    return from_section(SamplingParams, section, unread=unread)


def warm_up(engine: Engine, params: SamplingParams, progress: Progress) -> tuple[float, int]:
    """Build what requests with these settings need; returns the seconds it took and how many
    executables there are.
    """
    if not hasattr(engine.executor, "warm_up"):
        return 0.0, 0
    from paxserve.executor.real import Real

    assert isinstance(engine.executor, Real)
    seconds = engine.executor.warm_up(
        [variant_of(params)], lambda done, total: progress("compiling", done, total)
    )
    return seconds, len(engine.executor.executables)
