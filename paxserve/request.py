"""A request and its sequences: state without behaviour.

Owns: what is known about one request from arrival to finish. Everything that can be derived is a
property. Who changes it: `scheduler.py` (and `engine.py` for text). Policies only read it.

The life of a request:

    WAITING --admitted--> RUNNING --last token--> FINISHED --released--> (rows and blocks are free)
       ^                     |
       +----- preempted -----+

A finished request under static batching keeps its row and blocks until the batch dissolves.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum

from paxserve.sampling_params import SamplingParams
from paxserve.step import RowSampling, TokenLogprobs


class State(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended; `stop` and `length` are vLLM's words, `error` comes with a message."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who asks, and what is known of a request beside its content; for policies only.

    client: the account in fair sharing. priority: smaller is more urgent, as in vLLM.
    num_true_output_tokens: how long its output will really be, from a trace.
    num_predicted_output_tokens: what a predictor said of it, where the trace has that.
    cache_salt: prefixes are shared only between requests with the same salt, as in vLLM.
    """

    client: str = ""
    priority: int = 0
    num_true_output_tokens: int | None = None
    num_predicted_output_tokens: int | None = None
    cache_salt: str = ""


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One token list, one block table, one row.

    Planning needs only counts, never a token's value, so that a step can be planned while the one
    before it runs: `num_known_tokens` counts prompt and output tokens, those included that a
    planned step is still to sample; `num_computed_tokens` counts tokens whose KV is valid once the
    planned steps have run. `num_entry_tokens` were known when it entered its row; later ones were
    sampled there, so the device has them. `num_reserved_tokens` were promised when its table last
    grew. `row` is -1 while it has none.
    """

    sequence_id: int
    token_ids: list[int]
    num_known_tokens: int
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    num_reserved_tokens: int = 0
    num_entry_tokens: int = 0
    row: int = -1

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV is not computed: 1 is a decode, more is a prompt or a resume."""
        return self.num_known_tokens - self.num_computed_tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What the user submitted, and how far it has come. Times are the engine clock's seconds.

    `max_known_tokens` is the length, prompt included, at which it ends. `stop_ids` are all ids that
    end it. `admitted_seq` numbers admissions and is renewed on resume.
    """

    request_id: str
    arrival_s: float
    arrival_seq: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sampling: RowSampling
    max_known_tokens: int
    stop_ids: frozenset[int]
    sequences: tuple[Sequence, ...]
    prompt: str | None = None
    origin: Origin = Origin()

    state: State = State.WAITING
    admitted_seq: int = -1
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def sequence(self) -> Sequence:
        """The only sequence of a request with n = 1."""
        return self.sequences[0]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> SequenceOf[int]:
        """Tokens produced so far."""
        return self.sequences[0].token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens produced so far."""
        return len(self.sequences[0].token_ids) - len(self.prompt_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are not computed yet, in each sequence."""
        return self.sequences[0].num_remaining_tokens
