"""What a user gets back: `RequestOutput`, shaped as vLLM's, and `Delta` for streams.

Owns: the public result records and how they follow from a `Request`. Must not know: the engine.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from paxserve.request import Request, Sequence
from paxserve.step import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token's log-probability; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sequence's output.

    `finish_reason` is stop, length, abort or error; `stop_reason` the stop string or id that ended
    it, None for the model's own end token. `token_ids` include an end token, `text` does not.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times on the engine's clock, in seconds; None where it did not come to that."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and its outputs; `error` says why when the finish reason is error."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    error: str | None = None
    num_cached_tokens: int = field(default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One hypothesis. `tokens` and `text` begin with the prompt, as vLLM's; without a tokenizer
    there is no text. `cum_logprob` is the sum over the output.
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """The best hypotheses of a prompt, best first; none of them, and `error`, if it failed."""

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sequence of a request (`index`): whole characters, and the new
    token ids. `finished` is the sequence's end.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finished: bool
    finish_reason: str | None
    error: str | None = None
    index: int = 0


def request_output(request: Request, texts: SequenceOf[str]) -> RequestOutput:
    """The output of a request so far; a text per sequence."""
    first_times = [s.token_times_s[0] for s in request.sequences if s.token_times_s]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=[
            _completion(request, sequence, text)
            for sequence, text in zip(request.sequences, texts, strict=True)
        ],
        finished=request.finish_reason is not None,
        metrics=RequestMetrics(
            arrival_time=request.arrival_s,
            first_scheduled_time=request.first_scheduled_s,
            first_token_time=min(first_times, default=None),
            finished_time=request.finished_s,
            num_preemptions=request.num_preemptions,
        ),
        error=request.error,
        num_cached_tokens=request.num_hit_tokens,
    )


def _completion(request: Request, sequence: Sequence, text: str) -> CompletionOutput:
    entries = sequence.logprobs if request.params.logprobs is not None else None
    cumulative = sequence.cumulative_logprob if request.beams is not None else None
    if entries:
        cumulative = sum(e.logprob for e in entries)
    return CompletionOutput(
        index=sequence.index,
        text=text,
        token_ids=request.output_of(sequence),
        cumulative_logprob=cumulative,
        logprobs=None if entries is None else _logprobs(request.output_of(sequence), entries),
        finish_reason=sequence.finish_reason and sequence.finish_reason.value,
        stop_reason=sequence.stop_reason,
    )


def beam_search_output(
    output: RequestOutput, decode: Callable[[SequenceOf[int]], str] | None
) -> BeamSearchOutput:
    """The output of a request with beams, shaped as vLLM's `beam_search` gives it."""
    if output.error is not None:
        return BeamSearchOutput(sequences=[], error=output.error)
    sequences = []
    for completion in output.outputs:
        assert completion.cumulative_logprob is not None
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                cum_logprob=completion.cumulative_logprob,
                text=None if decode is None else decode(tokens),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
        )
    return BeamSearchOutput(sequences=sequences)


def rejected_output(prompt: str | None, error: str) -> RequestOutput:
    """The output of a request that was refused at the door: it has no id."""
    return RequestOutput(
        request_id="",
        prompt=prompt,
        prompt_token_ids=[],
        outputs=[
            CompletionOutput(
                index=0,
                text="",
                token_ids=[],
                cumulative_logprob=None,
                logprobs=None,
                finish_reason="error",
                stop_reason=None,
            )
        ],
        finished=True,
        error=error,
    )


def _logprobs(
    token_ids: SequenceOf[int], entries: SequenceOf[TokenLogprobs]
) -> list[dict[int, Logprob]]:
    """Per position: the best ids by rank, and the sampled one."""
    positions = []
    for token, entry in zip(token_ids, entries, strict=True):
        best = zip(entry.top_ids, entry.top_logprobs, strict=True)
        position = {
            token_id: Logprob(logprob=logprob, rank=rank)
            for rank, (token_id, logprob) in enumerate(best, start=1)
        }
        position[token] = Logprob(logprob=entry.logprob, rank=entry.rank)
        positions.append(position)
    return positions
