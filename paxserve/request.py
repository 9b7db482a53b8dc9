"""A request and its sequences: state without behaviour.

Owns: what is known about one request from arrival to finish. Everything that can be derived is a
property. Who changes it: `scheduler.py` (and `engine.py` for text). Policies only read it.

The life of a request:

    WAITING --admitted--> RUNNING --last token--> FINISHED --released--> (rows and blocks are free)
       ^                     |
       +----- preempted -----+

A finished request under static batching keeps its row and blocks until the batch dissolves.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from paxserve.sampling_params import SamplingParams
from paxserve.step import RowSampling, TokenLogprobs

if TYPE_CHECKING:
    from paxserve.beam_search import Beams


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
    num_declared_output_tokens: the most its client would take; where true lengths are forced, that
        is all a server would know.
    cache_salt: prefixes are shared only between requests with the same salt, as in vLLM.
    """

    client: str = ""
    priority: int = 0
    num_true_output_tokens: int | None = None
    num_predicted_output_tokens: int | None = None
    num_declared_output_tokens: int | None = None
    cache_salt: str = ""


NO_ORIGIN = Origin()


def token_array(token_ids: Iterable[int]) -> "array[int]":
    """Token ids as they are kept and as devices take them: 4 bytes each.

    Raises:
        TypeError: one is no integer.
        OverflowError: one is beyond 4 bytes.
    """
    return array("i", [*token_ids])


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One token list, one block table, one row.

    Planning needs only counts, never a token's value, so that a step can be planned while the one
    before it runs: `num_computed_tokens` counts tokens whose KV is valid once planned steps have
    run, `num_remaining_tokens` those behind them that are known, or that a planned step is still to
    sample: 1 is a decode, more is a prompt or a resume. `num_entry_tokens` were known when it
    entered its row; later ones were sampled there, so the device has them. `num_reserved_tokens`
    were promised when its table last grew. `num_published_blocks` have been offered to the prefix
    cache, `num_sent_blocks` of the table are known to the executor. `row` is -1 while it has none.

    `source`: another sequence of the request whose first `num_computed_tokens` tokens are its own
    too; it takes its blocks over when it is first computed, and until then holds none.
    `host_blocks` hold its computed tokens while it is swapped out.
    """

    sequence_id: int
    token_ids: "array[int]"
    num_remaining_tokens: int
    index: int = 0
    seed: int = 0
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    num_reserved_tokens: int = 0
    num_entry_tokens: int = 0
    num_published_blocks: int = 0
    num_sent_blocks: int = 0
    row: int = -1
    source: "Sequence | None" = None
    host_blocks: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens, those included that a planned step is still to sample."""
        return self.num_computed_tokens + self.num_remaining_tokens


def set_computed(sequence: Sequence, num_tokens: int) -> None:
    """So many of a sequence's known tokens count as computed."""
    sequence.num_remaining_tokens += sequence.num_computed_tokens - num_tokens
    sequence.num_computed_tokens = num_tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What the user submitted, and how far it has come. Times are the engine clock's seconds.

    `max_known_tokens` is the length, prompt included, at which a sequence ends. A trace forces true
    lengths by it, so policies look at `num_declared_tokens`: the most output tokens per sequence
    that a server would know of. `stop_ids` are all
    ids that end one. `live` are the sequences that have not ended. `admitted_seq` numbers
    admissions and is renewed on resume; it had `num_entry_output_tokens` then.
    `num_lost_tokens` were given up and not computed again yet.
    `num_cached_tokens` were found in the prefix cache when it was last admitted, `num_hit_tokens`
    in all admissions together. Slot-seconds: KV slots times the time for which it had them, with
    computed tokens (live), promised, and held at all; `Ledger.settle` fills them in.
    """

    request_id: str
    arrival_s: float
    arrival_seq: int
    num_prompt_tokens: int
    params: SamplingParams
    sampling: RowSampling
    max_known_tokens: int
    stop_ids: frozenset[int]
    sequences: tuple[Sequence, ...]
    prompt: str | None = None
    origin: Origin = NO_ORIGIN

    live: list[Sequence] = field(init=False)
    num_declared_tokens: int = 0
    beams: "Beams | None" = None
    state: State = State.WAITING
    admitted_seq: int = -1
    num_entry_output_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_hit_tokens: int = 0
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    live_slot_s: float = 0.0
    promised_slot_s: float = 0.0
    held_slot_s: float = 0.0

    def __post_init__(self) -> None:
        """Every sequence is live at first."""
        self.live = list(self.sequences)

    @property
    def sequence(self) -> Sequence:
        """The first sequence: the only one of a request with n = 1."""
        return self.sequences[0]

    @property
    def trunk(self) -> Sequence:
        """The first sequence that goes on, which others branch off; what policies look at."""
        return self.live[0]

    @property
    def num_produced_tokens(self) -> int:
        """Output tokens of one sequence that goes on; all have about as many."""
        return len(self.live[0].token_ids) - self.num_prompt_tokens

    @property
    def is_swapped(self) -> bool:
        """Whether the host holds what was computed."""
        return bool(self.live[0].host_blocks)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt, with which every sequence begins."""
        return tuple(self.sequences[0].token_ids[: self.num_prompt_tokens])

    @property
    def output_token_ids(self) -> SequenceOf[int]:
        """Tokens produced so far by the first sequence."""
        return self.output_of(self.sequences[0])

    def output_of(self, sequence: Sequence) -> list[int]:
        """Tokens produced so far by one of its sequences."""
        return sequence.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens produced so far, by all sequences together."""
        total = sum([len(sequence.token_ids) for sequence in self.sequences])
        return total - len(self.sequences) * self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are not computed yet, over its live sequences."""
        if len(self.sequences) == 1:
            return self.sequences[0].num_remaining_tokens
        return sum([sequence.num_remaining_tokens for sequence in self.live])

    @property
    def is_decode(self) -> bool:
        """Whether each live sequence lacks exactly one token."""
        return self.num_remaining_tokens == len(self.live)
