"""Serves a workload: each request arrives at its time, until all have ended.

Owns: the replay of arrivals against an engine's clock. In: an engine, arrivals, sampling settings.
Out: nothing; the engine has the requests. Must not know: policies, files.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paxserve.engine import Engine
from paxserve.intake import InvalidRequest, Prompt
from paxserve.models.chat_template import Message
from paxserve.models.tokenizer import Tokenizer
from paxserve.sampling_params import SamplingParams
from paxserve.workload import Arrival

type OnEnded = Callable[[int], None]


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    params: SamplingParams,
    *,
    tokenizer: Tokenizer | None = None,
    on_ended: OnEnded | None = None,
) -> list[tuple[Arrival, InvalidRequest]]:
    """Run a workload to its end.

    Args:
        engine: warmed up; its clock is read, and waited on while nothing is there to do.
        arrivals: by arrival time, counted from now.
        params: for all; an arrival's own `max_tokens` and `seed` win.
        tokenizer: for arrivals that are conversations.
        on_ended: called with the number of requests that ended in a step.

    Returns:
        The arrivals that were refused, and why. The others go on.
    """
    start_s = engine.clock.now_s()
    coming, refused = deque(arrivals), []
    while coming or engine.has_work:
        while coming and start_s + coming[0].arrival_s <= engine.clock.now_s():
            arrival = coming.popleft()
            try:
                engine.submit(
                    prompt_of(arrival, tokenizer),
                    params_of(arrival, params),
                    request_id=arrival.request_id,
                    arrival_s=start_s + arrival.arrival_s,
                )
            except InvalidRequest as error:
                refused.append((arrival, error))
                _report(on_ended, 1)
        if not engine.has_work:
            if coming:
                engine.clock.wait_until(start_s + coming[0].arrival_s)
            continue
        _report(on_ended, sum(r.finish_reason is not None for r in engine.step()))
    return refused


def params_of(arrival: Arrival, params: SamplingParams) -> SamplingParams:
    """The run's settings with the arrival's own in their place.

    Raises:
        InvalidRequest: the arrival's own are out of range.
    """
    own: dict[str, Any] = {}
    if arrival.max_tokens is not None:
        own["max_tokens"] = arrival.max_tokens
        own["min_tokens"] = min(params.min_tokens, max(arrival.max_tokens, 0))
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
