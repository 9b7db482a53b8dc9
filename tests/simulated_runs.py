"""Simulated engines whose costs are a few plain terms, and requests that arrive at given times."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from builders import make_intake, make_policies, prompt_ids

from paxserve.clock import VirtualClock
from paxserve.cost_model import Costs
from paxserve.device.buckets import Exact
from paxserve.engine import Engine
from paxserve.executor.simulated import Simulated
from paxserve.folded import FoldedRequests
from paxserve.limits import Limits
from paxserve.notices import Notices
from paxserve.request import Origin
from paxserve.step import StepPlan
from paxserve.workload import Arrival

VOCAB_SIZE = 40


class Recorded(Simulated):
    """Keeps its plans, by step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.plans: dict[int, StepPlan] = {}

    def submit(self, plan: StepPlan) -> None:
        self.plans[plan.step_id] = plan
        super().submit(plan)


def simulated(
    limits: Limits,
    said: list[str],
    *,
    leaps: bool = True,
    folded: FoldedRequests | None = None,
    **chosen: Any,
) -> Engine:
    """A step takes a base, and some for each row and each token of context: no round numbers."""
    costs = Costs(
        ("base", "rows", "context"),
        lambda shape: (0.1, 0.003 * shape.num_rows, 0.0007 * shape.decode_context),
    )
    return Engine(
        limits=limits,
        policies=make_policies(**chosen),
        executor=Recorded(
            limits=limits,
            vocab_size=VOCAB_SIZE,
            costs=costs,
            bytes_per_block=7,
            buckets=Exact(),
            leaps=leaps,
        ),
        clock=VirtualClock(),
        intake=make_intake(limits, vocab_size=VOCAB_SIZE),
        notices=Notices(status=None, warn=said.append),
        folded=folded,
    )


type Ask = tuple[int, int, int, float, str, int]


def arrivals_of(requests: Iterable[Ask]) -> Iterator[Arrival]:
    """Of (prompt tokens, salt, output tokens, pause before it, client, priority)."""
    arrival_s = 0.0
    for number, (length, salt, output, pause_s, client, priority) in enumerate(requests):
        arrival_s += pause_s
        yield arrival(
            number,
            [t % VOCAB_SIZE for t in prompt_ids(length, salt)],
            output,
            arrival_s=arrival_s,
            client=client,
            priority=priority,
        )


def arrival(
    number: int,
    prompt: Sequence[int],
    num_output: int,
    *,
    arrival_s: float = 0.0,
    client: str = "",
    priority: int = 0,
) -> Arrival:
    """One that ends by its length."""
    return Arrival(
        request_id=str(number),
        arrival_s=arrival_s,
        prompt_token_ids=tuple(prompt),
        max_tokens=num_output,
        ignore_eos=True,
        origin=Origin(client=client, priority=priority, num_true_output_tokens=num_output),
    )
