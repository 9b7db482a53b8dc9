"""Serves a workload: each request arrives at its time, until all have ended.

Owns: the replay of arrivals against an engine's clock, and telling their source of ends. In: an
engine, a source, sampling settings. Out: what was refused; the engine has the requests. Must not
know: policies, files.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paxserve.engine import Engine
from paxserve.intake import InvalidRequest, Prompt
from paxserve.models.chat_template import Message
from paxserve.models.tokenizer import Tokenizer
from paxserve.request import Request
from paxserve.sampling_params import SamplingParams
from paxserve.workload import Arrival, Source

type OnEnded = Callable[[int], None]
type OnStep = Callable[[], None]


def serve(
    engine: Engine,
    source: Source,
    params: SamplingParams,
    *,
    tokenizer: Tokenizer | None = None,
    on_ended: OnEnded | None = None,
    on_step: OnStep | None = None,
) -> list[tuple[Arrival, InvalidRequest]]:
    """Run a workload to its end.

    Args:
        engine: warmed up; its clock is read, and waited on while nothing is there to do.
        source: of arrivals, their times counted from now.
        params: for all; an arrival's own `max_tokens`, `ignore_eos` and `seed` win.
        tokenizer: for arrivals that are conversations.
        on_ended: called with the number of requests that ended in a step.
        on_step: called after each step.

    Returns:
        The arrivals that were refused, and why. The others go on.
    """
    start_s = engine.clock.now_s()
    refused: list[tuple[Arrival, InvalidRequest]] = []
    while (next_s := source.next_s()) is not None or engine.has_work:
        if next_s is not None and start_s + next_s <= engine.clock.now_s():
            arrival = source.take()
            try:
                _submit(engine, arrival, params, tokenizer, start_s=start_s)
            except InvalidRequest as error:
                refused.append((arrival, error))
                source.on_end(arrival.request_id, engine.clock.now_s() - start_s, ())
                _report(on_ended, 1)
        elif engine.has_work:
            alone_until_s = math.inf if next_s is None else start_s + next_s
            progressed = engine.step(alone_until_s=alone_until_s)
            ended = [request for request in progressed if request.finish_reason is not None]
            for request in ended:
                source.on_end(
                    request.request_id, _end_s(request) - start_s, tuple(request.output_token_ids)
                )
            _report(on_ended, len(ended))
            if on_step is not None:
                on_step()
        else:
            assert next_s is not None
            engine.clock.wait_until(start_s + next_s)
    return refused


def _submit(
    engine: Engine,
    arrival: Arrival,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    start_s: float,
) -> None:
    engine.submit(
        prompt_of(arrival, tokenizer),
        params_of(arrival, params),
        request_id=arrival.request_id,
        arrival_s=start_s + arrival.arrival_s,
        origin=arrival.origin,
    )


def _end_s(request: Request) -> float:
    assert request.finished_s is not None
    return request.finished_s


def params_of(arrival: Arrival, params: SamplingParams) -> SamplingParams:
    """The run's settings with the arrival's own in their place.

    Raises:
        InvalidRequest: the arrival's own are out of range.
    """
    own: dict[str, Any] = {}
    if arrival.max_tokens is not None:
        own["max_tokens"] = arrival.max_tokens
        own["min_tokens"] = min(params.min_tokens, max(arrival.max_tokens, 0))
    if arrival.ignore_eos is not None:
        own["ignore_eos"] = arrival.ignore_eos
    if arrival.seed is not None:
        own["seed"] = arrival.seed
    try:
        return replace(params, **own)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def prompt_of(arrival: Arrival, tokenizer: Tokenizer | None) -> Prompt:
    """The arrival's content as the engine takes it.

    Raises:
        InvalidRequest: a conversation, and no tokenizer or a template that does not take it.
    """
    if arrival.prompt is not None:
        return arrival.prompt
    if arrival.prompt_token_ids is not None:
        return {"prompt_token_ids": arrival.prompt_token_ids}
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: give prompt_token_ids, not messages")
    return chat_prompt(arrival.messages or (), tokenizer)


def chat_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> Prompt:
    """A conversation as token ids.

    Raises:
        InvalidRequest: it is malformed, or the model has no template for it.
    """
    try:
        return {"prompt_token_ids": tokenizer.apply_chat_template(messages)}
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _report(on_ended: OnEnded | None, number: int) -> None:
    if on_ended is not None and number:
        on_ended(number)
