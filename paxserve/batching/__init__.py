"""What a step holds: the protocol of the batching axis, the one structural policy.

A batching policy is a generator. It yields proposals and is sent the verdict on each, since real
schedulers react to the answer (stop at the first refusal, admit nobody in a step that preempted).
It sees requests and a `View`, and changes neither; the scheduler owns rows, budget and memory.

There are no phases. A request has known tokens, of which some are computed; what is left is its
`num_remaining_tokens`: 1 is a decode, more is a prompt, a chunk of one, or a resume.
"""

from collections.abc import Generator, Iterator, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from paxserve.limits import Limits
from paxserve.request import Request


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
    """Compute the next `num_tokens` of a request in this step; a waiting one is admitted first.

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
    """

    release: Literal["at_finish", "with_batch"]
    whole_prompts: bool

    def propose(self, view: View) -> Generator[Proposal, Verdict, None]:
        """One step."""


def split(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Those that need exactly one token computed per sequence, and those that need more."""
    decodes: list[Request] = []
    prompts: list[Request] = []
    for request in requests:
        if len(request.sequences) == 1:
            (sequence,) = request.sequences
            is_decode = sequence.num_known_tokens - sequence.num_computed_tokens == 1
        else:
            is_decode = request.is_decode
        (decodes if is_decode else prompts).append(request)
    return decodes, prompts
