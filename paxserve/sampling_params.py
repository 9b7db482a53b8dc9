"""`SamplingParams` and `BeamSearchParams`: what a user asks for, checked at the door.

Owns: ranges of sampling values. Field names and defaults are vLLM's. Must not know: the engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SUPPRESSED_IDS = 16
MAX_SAMPLES = 64
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # each beam offers twice as many candidates
MAX_SEED = 2**32 - 1
MAX_COUNT = 2**31 - 1  # counts travel as int32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Attributes:
        n: number of samples, drawn independently of each other.
        beam_width: search with this many beams instead of sampling; 0 is off.
        length_penalty: beams are ranked by log-probability / length ** length_penalty.
        temperature: 0 is greedy; finite, at most 2 as in the usual APIs.
        top_k: keep the k most probable tokens; 0 or -1 is off.
        top_p: keep the smallest most-probable set with at least this mass, in (0, 1].
        min_p: drop tokens below this share of the best probability, in [0, 1].
        seed: the request's own random stream; None: from the engine's seed and the request's id.
        max_tokens: most output tokens; None means as many as the model length leaves.
        min_tokens: neither end tokens nor stop strings end the output before this many.
        stop: a string or strings that end the output; cut from the text unless
            `include_stop_str_in_output`.
        stop_token_ids: ids that end the output beside the model's own end tokens.
        ignore_eos: the model's end tokens do not end the output.
        logprobs: None, or report the sampled token's and this many best log-probabilities.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value is out of range or not finite, or two do not go together; the message
            names them.
    """

    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Normalise the two sequence fields to tuples and check every range."""
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        stop_token_ids = _sequence("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        _integer("n", self.n, low=1, high=MAX_SAMPLES)
        _integer("beam_width", self.beam_width, low=0, high=MAX_BEAM_WIDTH)
        _real("length_penalty", self.length_penalty, low=-10.0, high=10.0)
        _real("temperature", self.temperature, low=0.0, high=2.0)
        _integer("top_k", self.top_k, low=-1, high=MAX_COUNT)
        _real("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _real("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _integer("seed", self.seed, low=0, high=MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1, high=MAX_COUNT)
        most = MAX_COUNT if self.max_tokens is None else self.max_tokens
        _integer("min_tokens", self.min_tokens, low=0, high=most)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        for flag in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, flag), bool):
                raise ValueError(f"{flag} must be true or false, got {getattr(self, flag)!r}")
        _check_stops(stop)
        self._check_number()
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, low=0)

    def _check_number(self) -> None:
        """Rules between the number of samples and how they are chosen."""
        if self.n > 1 and self.temperature == 0 and not self.beam_width:
            raise ValueError(f"n={self.n} with temperature=0: greedy samples are all the same")
        if not self.beam_width:
            return
        if self.n != 1:
            raise ValueError(f"n={self.n} with beam_width={self.beam_width}: choose one of them")
        if self.temperature != 0:
            raise ValueError(
                f"beam_width={self.beam_width} needs temperature=0, got {self.temperature}"
            )
        if self.logprobs is not None or self.stop:
            raise ValueError("beam search takes neither logprobs nor stop strings")

    @property
    def num_sequences(self) -> int:
        """Sequences that a request with these settings has."""
        return self.beam_width or self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its normal form."""
        return tuple(self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """What `LLM.beam_search` is asked for: `SamplingParams` with beams, under vLLM's names.

    Attributes:
        beam_width: hypotheses that are kept.
        max_tokens: most output tokens of each.
        ignore_eos: the model's end tokens do not end a hypothesis.
        length_penalty: see `SamplingParams`.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Check every range."""
        _integer("beam_width", self.beam_width, low=1, high=MAX_BEAM_WIDTH)
        _ = self.sampling_params

    @property
    def sampling_params(self) -> SamplingParams:
        """The same for `generate`."""
        return SamplingParams(
            temperature=0.0,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
        )


def _sequence(name: str, value: Sequence[Any] | None) -> tuple[Any, ...]:
    try:
        return tuple(value or ())
    except TypeError:
        raise ValueError(f"{name} must be a list, got {value!r}") from None


def _real(name: str, value: object, *, low: float, high: float, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = is_number and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type,operator]
    if not inside or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be a number in {bracket}{low}, {high}], got {value!r}")


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {limit}, got {value!r}")


def _check_stops(stop: tuple[object, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop has {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must hold non-empty strings, got {text!r}")
