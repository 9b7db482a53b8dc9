"""The door: what a user hands in becomes a `Request`, or an `InvalidRequest` that says why not.

Owns: every check on prompts and on sampling values that need the model or the limits. In: a
prompt, `SamplingParams`. Out: a request that the scheduler can serve without further checks.
Must not know: queues, devices.
"""

import math
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TypedDict

from paxserve.beam_search import Beams
from paxserve.limits import Limits
from paxserve.models.tokenizer import Tokenizer
from paxserve.request import NO_ORIGIN, Origin, Request, token_array
from paxserve.request import Sequence as TokenSequence
from paxserve.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_SUPPRESSED_IDS, SamplingParams
from paxserve.step import RowSampling


class TextPrompt(TypedDict):
    """A prompt that is text, as vLLM spells it."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that is token ids already."""

    prompt_token_ids: Sequence[int]


type Prompt = str | TextPrompt | TokensPrompt


def text_of(prompt: Prompt) -> str | None:
    """The prompt's text, if it is one."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt")  # type: ignore[assignment]
    return prompt if isinstance(prompt, str) else None


_NONE: frozenset[int] = frozenset()  # shared by all that have no end token


class InvalidRequest(ValueError):
    """The request cannot be served; nothing else is affected."""


class Intake:
    """Makes requests.

    Args:
        limits: of the engine.
        vocab_size: of the model's head; ids outside it would be clamped silently by jax.
        eos_token_ids: the model's end tokens.
        tokenizer: needed for text prompts and stop strings.
        seed: of the engine; a request without its own seed gets one from this and its id.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> None:
        self.limits = limits
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._seed = seed
        self._numbers = count()
        self._arrivals = count()
        self._names = count()
        self._taken_ids: set[str] = set()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_s: float,
        request_id: str | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> Request:
        """Check a prompt and its parameters.

        Args:
            prompt: text, or `{"prompt_token_ids": [...]}`.
            params: checked in themselves already.
            arrival_s: on the engine's clock.
            request_id: used once, since results and seeds go by it; default: the first number
                that is not taken.
            origin: who asks, and what is known of the request from outside.

        Raises:
            InvalidRequest: names the value and the limit it breaks.
        """
        token_ids = self._token_ids(prompt)
        self._check_length(len(token_ids))
        stop_ids = self._stop_ids(params)
        if not math.isfinite(arrival_s):
            raise InvalidRequest(f"arrival_s must be a finite number of seconds, got {arrival_s}")
        if params.num_sequences > self.limits.max_num_seqs:
            raise InvalidRequest(
                f"{params.num_sequences} sequences do not fit max_num_seqs="
                f"{self.limits.max_num_seqs} rows: lower n or beam_width"
            )
        name = self._new_id(request_id)
        sampling = self._row_sampling(params, stop_ids, name)
        length = self.limits.max_model_len
        if params.max_tokens is not None:
            length = min(length, len(token_ids) + params.max_tokens)
        return Request(
            request_id=name,
            arrival_s=arrival_s,
            arrival_seq=next(self._arrivals),
            prompt=text_of(prompt),
            num_prompt_tokens=len(token_ids),
            params=params,
            sampling=sampling,
            max_known_tokens=length,
            stop_ids=frozenset(stop_ids) if stop_ids else _NONE,
            sequences=tuple(
                [
                    TokenSequence(
                        sequence_id=next(self._numbers),
                        index=index,
                        token_ids=token_ids[:],
                        num_remaining_tokens=len(token_ids),
                        seed=seed_of_sample(sampling.seed, index),
                    )
                    for index in range(params.num_sequences)
                ]
            ),
            origin=origin,
            num_declared_tokens=self._declared(origin, len(token_ids), length),
            beams=Beams(width=params.beam_width, length_penalty=params.length_penalty)
            if params.beam_width
            else None,
        )

    def take_back(self, request_id: str) -> None:
        """The request of this id is not served after all; the id may be used again."""
        self._taken_ids.discard(request_id)

    def _declared(self, origin: Origin, num_prompt: int, max_known_tokens: int) -> int:
        """Most output tokens, as far as a server would be told."""
        longest = self.limits.max_model_len - num_prompt
        if origin.num_declared_output_tokens is not None:
            return min(longest, origin.num_declared_output_tokens)
        is_forced = origin.num_true_output_tokens is not None
        return longest if is_forced else max_known_tokens - num_prompt

    def _new_id(self, wanted: str | None) -> str:
        if wanted is None:
            wanted = next(name for name in map(str, self._names) if name not in self._taken_ids)
        elif wanted in self._taken_ids:
            raise InvalidRequest(f"request id {wanted!r} has been used already")
        elif not isinstance(wanted, str) or not wanted or not _is_unicode(wanted):
            raise InvalidRequest(f"a request id must be a text, got {wanted!r}")
        self._taken_ids.add(wanted)
        return wanted

    def _token_ids(self, prompt: Prompt) -> "array[int]":
        text = text_of(prompt)
        if text is not None and (isinstance(prompt, str) or set(prompt) == {"prompt"}):
            if self._tokenizer is None:
                raise InvalidRequest(
                    "this model has no tokenizer: give {'prompt_token_ids': [...]} instead of text"
                )
            try:
                token_ids: Sequence[object] = self._tokenizer.encode(text)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error
        elif isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
            token_ids = prompt["prompt_token_ids"]  # type: ignore[typeddict-item]
        else:
            raise InvalidRequest(
                "a prompt is a string or {'prompt': ...}, or {'prompt_token_ids': [...]}, "
                f"got {str(prompt)[:80]!r}"
            )
        return self._check_ids("prompt_token_ids", token_ids)

    def _check_ids(self, name: str, token_ids: Iterable[object]) -> "array[int]":
        try:
            ids = token_array(token_ids)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidRequest(f"{name} must be a list of integers") from None
        except OverflowError:
            ids = None
        if ids is None or (ids and (min(ids) < 0 or max(ids) >= self._vocab_size)):
            wrong = next(i for i in token_ids if not 0 <= i < self._vocab_size)  # type: ignore[operator]
            raise InvalidRequest(
                f"{name} holds {wrong}, outside the model's vocabulary 0..{self._vocab_size - 1}"
            )
        return ids

    def _check_length(self, num_tokens: int) -> None:
        limits = self.limits
        if num_tokens == 0:
            raise InvalidRequest("the prompt is empty: it has no tokens")
        if num_tokens >= limits.max_model_len:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, max_model_len={limits.max_model_len} leaves "
                f"room for at most {limits.max_model_len - 1} and one output token"
            )
        if num_tokens > limits.num_usable_slots:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, the KV pool holds {limits.num_usable_slots} "
                f"({limits.num_usable_blocks} blocks of {limits.block_size})"
            )

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        stop_ids = tuple(self._check_ids("stop_token_ids", params.stop_token_ids))
        if not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys((*stop_ids, *self._eos_token_ids)))
        if params.min_tokens and len(stop_ids) > MAX_SUPPRESSED_IDS:
            raise InvalidRequest(
                f"min_tokens={params.min_tokens} must suppress {len(stop_ids)} end tokens, "
                f"at most {MAX_SUPPRESSED_IDS} are possible"
            )
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequest("stop strings need a model with a tokenizer")
        return stop_ids

    def _row_sampling(
        self, params: SamplingParams, stop_ids: tuple[int, ...], request_id: str
    ) -> RowSampling:
        seed = params.seed
        if seed is None:
            seed = zlib.crc32(f"{self._seed}/{request_id}".encode()) & MAX_SEED
        return RowSampling(
            temperature=float(params.temperature),
            top_k=max(params.top_k, 0),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            seed=seed,
            num_logprobs=_num_logprobs(params, len(stop_ids)),
            min_tokens=params.min_tokens,
            suppressed_ids=stop_ids if params.min_tokens else (),
        )


def seed_of_sample(seed: int, index: int) -> int:
    """The random stream of sample number `index`; the first one has the request's own."""
    return zlib.crc32(f"{seed}/{index}".encode()) & MAX_SEED if index else seed


def _num_logprobs(params: SamplingParams, num_stop_ids: int) -> int:
    """Best tokens to report; -1 for none. Of a beam's candidates `beam_width` must go on even where
    every end token is among them.
    """
    if params.beam_width:
        return min(MAX_LOGPROBS, 2 * params.beam_width + num_stop_ids)
    return -1 if params.logprobs is None else params.logprobs


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
