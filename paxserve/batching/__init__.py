"""What a step holds: the protocol of the batching axis, the one structural policy.

A batching policy is a generator. It yields proposals and is sent the verdict on each, since real
schedulers react to the answer (stop at the first refusal, admit nobody in a step that preempted).
It sees requests and a `View`, and changes neither; the scheduler owns rows, budget and memory.

A policy is a frozen dataclass with `release`, `whole_prompts` and `propose` (see `Batching`), and

    is_steady = True     a step of decodes comes again as it was while nobody comes or goes
    is_steady = False    it may not: the policy looks at time, at `view.previous`, at itself

Simulations take runs of steady steps in one move (`leaping.py`), which changes no figure and is
most of their speed. Without a word of it steps are taken one by one, and the run says so. Steady is
a policy whose proposals follow from who runs and waits, what they lack, and the verdicts alone.

There are no phases. A request has known tokens, of which some are computed; what is left is its
`num_remaining_tokens`: 1 is a decode, more is a prompt, a chunk of one, or a resume.
"""

from collections.abc import Generator, Iterator, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from paxserve.limits import Limits
from paxserve.request import Request
from paxserve.step import StepPlan


class Reason(StrEnum):
    """Why a proposal was refused."""

    BUDGET = "budget"
    ROWS = "rows"
    BLOCKS = "blocks"
    GATE = "gate"


class Admit(NamedTuple):
    """Give a waiting request its row and memory for `num_tokens`; compute nothing yet."""

    request: Request
    num_tokens: int


class Grant(NamedTuple):
    """Compute at most the next `num_tokens` of a request; a waiting one is admitted first, and what
    the prefix cache holds of it need not be computed.

    Refused if less than `num_kept` of the budget would be left for others.
    """

    request: Request
    num_tokens: int
    num_kept: int = 0


class Decodes(NamedTuple):
    """Compute one token for each of these running requests, in this order."""

    requests: Sequence[Request]


type Proposal = Admit | Grant | Decodes


class Verdict(NamedTuple):
    """The answer: tokens granted (of them found in the prefix cache), or the reason for none.

    `num_preempted` requests lost their memory to make room for this proposal.
    """

    num_tokens: int
    num_cached_tokens: int = 0
    refused: Reason | None = None
    num_preempted: int = 0


class View(Protocol):
    """What a policy may look at; always current, also between two proposals."""

    limits: Limits
    previous: StepPlan | None  # the step planned before this one

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a row and are not finished, in order of admission."""

    @property
    def budget_left(self) -> int:
        """Tokens that this step can still hold."""

    def waiting(self) -> Iterator[Request]:
        """Requests without a row, in the admission policy's order."""


class Batching(Protocol):
    """The policy.

    `release`: a finished request lets go of row and memory `at_finish`, or `with_batch`, when
    nothing runs any more. `whole_prompts`: prompts are never split, so a step must be able to hold
    `max_model_len` tokens.

    A policy may also declare `is_steady` (see above): True if what it proposes depends on who runs
    and waits, on what they lack and on the verdicts, and on nothing else, such as `view.previous`
    or how long an output is.
    """

    release: Literal["at_finish", "with_batch"]
    whole_prompts: bool

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """One step."""


def is_prompt(request: Request) -> bool:
    """Whether a running request has not reached the tokens sampled in its row: its prompt, or what
    it resumed with, is still being computed, be it the last token of it.
    """
    return any(s.num_computed_tokens < s.num_entry_tokens for s in request.live)


def split(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Those that need exactly one token computed per sequence, and those that need more."""
    remaining = [request.live[0].num_remaining_tokens for request in requests]
    if remaining.count(1) == len(requests) == sum([len(r.live) for r in requests]):
        return list(requests), []  # the usual step
    decodes: list[Request] = []
    prompts: list[Request] = []
    for request in requests:
        (decodes if request.is_decode else prompts).append(request)
    return decodes, prompts


def chunk_of(request: Request, view: View, threshold: int) -> int:
    """Tokens to ask for: what is left of the request, of the budget, and of `threshold` unless that
    is 0. At least 1, so that the scheduler says why there is none.
    """
    num_tokens = min(request.num_remaining_tokens, max(view.budget_left, 1))
    return min(num_tokens, threshold) if threshold else num_tokens


def enter_in_chunks(
    view: View, *, threshold: int, max_num_partial: int
) -> Generator[Proposal, Verdict, None]:
    """Admit in order, with as much of each prompt as fits, until one is refused.

    A prompt that would be one more than `max_num_partial` begun and unfinished ones waits, and so
    do those behind it; 0 is no limit.
    """
    num_partial = sum(map(is_prompt, view.running)) if max_num_partial else 0
    for request in view.waiting():
        num_tokens = chunk_of(request, view, threshold)
        is_whole = num_tokens == request.num_remaining_tokens
        if max_num_partial and num_partial >= max_num_partial and not is_whole:
            break
        verdict = yield Grant(request, num_tokens)
        if verdict.refused:
            break
        num_partial += is_prompt(request)


def check_chunk_limits(**limits: int) -> None:
    """Refuse knobs that are not a count of tokens or prompts.

    Raises:
        ValueError: names the knob and its value.
    """
    for name, value in limits.items():
        if type(value) is not int or not 0 <= value < 2**31:
            raise ValueError(
                f"{name} must be a whole number from 0 (no limit) to 2**31 - 1, got {value!r}"
            )
