"""What a simulated step is told of a finished run: the tokens, and if need be the time.

Owns: an executor that says what the sequences of that run said, and costs that are its recorded
durations. In: a finished run's requests and steps. Out: an `Executor`, `Costs`. Must not know:
policies, cost models.

A simulator knows how long steps take, never what a model says. Told that, its requests end where
the real ones did, and what they produced is found again by later prompts; all else is its own.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from paxserve.cost_model import Costs
from paxserve.executor import Executor
from paxserve.records import StepRecord
from paxserve.request import Request
from paxserve.step import NO_OUTPUT, RowOutput, StepPlan, StepResult
from paxserve.step_shape import StepShape


class Retold:
    """Another executor's results with the tokens of a finished run, whose requests came in the same
    order, so that sequences have the same numbers.

    Raises:
        ValueError: one of the requests was a beam search, which follows more than its tokens.
    """

    def __init__(self, executor: Executor, requests: Iterable[Request]) -> None:
        self.terms = getattr(executor, "terms", ())
        self._executor = executor
        self._outputs: dict[int, Sequence[int]] = {}
        for request in requests:
            if request.beams is not None:
                raise ValueError(
                    f"request {request.request_id} is a beam search: its log-probabilities decide, "
                    "and no simulator has them; set sampling=greedy or random"
                )
            for sequence in request.sequences:
                self._outputs[sequence.sequence_id] = request.output_of(sequence)
        self._num_prompt_tokens: dict[int, int] = {}
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        for entry in plan.entries:
            self._num_prompt_tokens[entry.sequence_id] = entry.num_prompt_tokens
        self._plans.append(plan)
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        outputs = []
        for row in self._plans.popleft().rows:
            position = row.first_position + row.num_tokens
            position -= self._num_prompt_tokens[row.sequence_id]
            token = self._outputs[row.sequence_id][position] if row.num_samples else None
            outputs.append(NO_OUTPUT if token is None else RowOutput((token,)))
        return self._executor.collect()._replace(outputs=tuple(outputs))

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._plans.clear()
        self._executor.reset()


def recorded_costs(steps: Sequence[StepRecord]) -> Costs:
    """Each step takes what the step of that place took in a finished run, whatever its shape."""
    durations = iter([step.duration_s for step in steps])

    def of(shape: StepShape) -> tuple[float, ...]:
        return (next(durations),)

    return Costs(("recorded",), of)


def recorded_costs_and_gaps(
    steps: Sequence[StepRecord], requests: Iterable[Request], *, start_s: float
) -> Costs:
    """The same on a clock that only costs move: each step also takes what the host took before it,
    since the step before had ended (at first, since `start_s`) or, if nobody was there then, since
    the next request came. A
    run that decides otherwise may need more steps; these take as long as the mean.
    """
    left = sorted([(r.finished_s, r.arrival_s) for r in requests if r.finished_s is not None])
    end_s, pairs = start_s, []
    for step in steps:
        waiting = [arrival_s for finished_s, arrival_s in left if finished_s > step.start_s]
        begin_s = max(end_s, min(waiting, default=end_s))
        pairs.append((step.duration_s, max(0.0, step.start_s - begin_s)))
        end_s = step.start_s + step.duration_s
    means = tuple([sum(column) / max(1, len(pairs)) for column in zip(*pairs, strict=True)])
    told = iter(pairs)

    def of(shape: StepShape) -> tuple[float, ...]:
        return next(told, means)

    return Costs(("recorded", "host"), of)
