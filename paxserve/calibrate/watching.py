"""Steps as they come while requests are served: what no design thinks of, and the gaps between.

Owns: the requests, and an executor that looks at steps. In: a bench. Out: `Served`. Must not know:
what is fitted to it.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paxserve.calibrate.measuring import longest_context, shape_that_ran
from paxserve.executor import Executor
from paxserve.fidelity.bench import Bench
from paxserve.step import StepPlan, StepResult
from paxserve.step_shape import StepShape
from paxserve.workload import Arrival, Source, Vocabulary
from paxserve.workload.sources.listed import Listed

MOST_OUTPUT = 32  # tokens of a request


class Served(NamedTuple):
    """Steps that moved no blocks: their shapes and durations, and the gap after each, until the
    next one began; 0 after the last.
    """

    shapes: list[StepShape]
    durations_s: list[float]
    gaps_s: list[float]


def serve_and_watch(bench: Bench, *, rng: np.random.Generator) -> Served:
    """Serve requests of many lengths, twice as many as there are rows, all there at once."""
    watched = Watched(bench.executor)
    arrivals = Listed(_arrivals(bench, rng))
    steps = bench.real(arrivals, executor=watched).engine.steps
    ends_s = [step.start_s + step.duration_s for step in steps]
    next_s = [*[step.start_s for step in steps[1:]], ends_s[-1]]
    kept = [
        (shape, step.duration_s, start_s - end_s)
        for shape, step, end_s, start_s in zip(watched.shapes, steps, ends_s, next_s, strict=True)
        if not shape.num_copied and not shape.num_swapped
    ]
    return Served(*[list(column) for column in zip(*kept, strict=True)])


def _arrivals(bench: Bench, rng: np.random.Generator) -> list[Arrival]:
    longest = longest_context(bench.limits)
    most_output = max(1, min(MOST_OUTPUT, longest // 2))
    lengths = np.exp(rng.uniform(0, np.log(longest - most_output), 2 * bench.limits.max_num_seqs))
    return [
        Arrival(
            request_id=str(number),
            prompt_token_ids=tuple(rng.integers(0, bench.vocab_size, int(length)).tolist()),
            max_tokens=int(rng.integers(1, most_output + 1)),
            ignore_eos=True,
        )
        for number, length in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True)
class NoRequests:
    """A workload for a bench whose requests are made by `serve_and_watch`, which needs its limits
    for that.
    """

    forces_lengths = True

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        return Listed([])


class Watched:
    """Another executor; `shapes` are those of the steps that it ran."""

    def __init__(self, executor: Executor) -> None:
        self.shapes: list[StepShape] = []
        self._executor = executor
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        self._plans.append(plan)
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        result = self._executor.collect()
        self.shapes.append(shape_that_ran(self._plans.popleft(), result))
        return result

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._plans.clear()
        self._executor.reset()
