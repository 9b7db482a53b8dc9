"""Times of steps on the real executor: of probes, and of requests that are served.

Owns: in what order things are measured. In: a warm executor, probes; or a bench. Out: seconds.
Must not know: what is fitted to them.

Probes are measured in rounds, each in an order of its own, so that a machine that gets slower does
so for all of them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paxserve.calibrate.probes import Probe
from paxserve.executor import Executor
from paxserve.experiment import Progress
from paxserve.fidelity.bench import Bench
from paxserve.limits import Limits
from paxserve.step import RowEntry, Rows, RowSampling, StepPlan, StepResult, TableWrite
from paxserve.step_shape import StepShape, shape_of
from paxserve.workload import Arrival, Source, Vocabulary
from paxserve.workload.sources.listed import Listed

MOST_OUTPUT = 32  # tokens of a request that is served to look at its steps


class Served(NamedTuple):
    """Steps of served requests, and the gap after each but the last: until the next one begins."""

    shapes: list[StepShape]
    durations_s: list[float]
    gaps_s: list[float]


def longest_context(limits: Limits) -> int:
    """Tokens that every row can have at once."""
    per_row = min(limits.blocks_per_row, limits.num_usable_blocks // limits.max_num_seqs)
    return min(limits.max_model_len, per_row * limits.block_size)


def measure(
    executor: Executor,
    probes: Sequence[Probe],
    *,
    limits: Limits,
    sampling: RowSampling,
    repetitions: int,
    rng: np.random.Generator,
    progress: Progress,
) -> tuple[list[StepShape], list[float]]:
    """The shape of each probe as it ran, and the median of its seconds.

    Args:
        executor: warm; nothing else uses it.
        probes: their contexts are at most `longest_context` long.
        limits: the executor's.
        sampling: of every row.
        repetitions: rounds.
        rng: of their orders.
        progress: called with (what, done, total).
    """
    _run(executor, _entering(limits, sampling))
    seconds: list[list[float]] = [[] for _ in probes]
    shapes: dict[int, StepShape] = {}
    done, total = 0, repetitions * len(probes)
    for _ in range(repetitions):
        for i in rng.permutation(len(probes)).tolist():
            progress("steps measured", done, total)
            plan = probes[i].plan(done)
            result = _run(executor, plan)
            shapes[i] = _shape(plan, result)
            seconds[i].append(result.duration_s)
            done += 1
    progress("steps measured", total, total)
    medians = [float(np.median(taken_s)) for taken_s in seconds]
    return [shapes[i] for i in range(len(probes))], medians


def serve_and_watch(bench: Bench, *, rng: np.random.Generator) -> Served:
    """Serve requests of many lengths, twice as many as there are rows, all there at once."""
    limits, watched = bench.limits, Watched(bench.executor)
    longest = longest_context(limits)
    most_output = max(1, min(MOST_OUTPUT, longest // 2))
    arrivals = [
        Arrival(
            request_id=str(i),
            prompt_token_ids=(0,) * int(np.exp(rng.uniform(0, np.log(longest - most_output)))),
            max_tokens=int(rng.integers(1, most_output + 1)),
            ignore_eos=True,
        )
        for i in range(2 * limits.max_num_seqs)
    ]
    steps = bench.real(Listed(arrivals), executor=watched).engine.steps
    ends_s = [step.start_s + step.duration_s for step in steps]
    starts_s = [step.start_s for step in steps[1:]]
    return Served(
        shapes=watched.shapes,
        durations_s=[step.duration_s for step in steps],
        gaps_s=[start_s - end_s for end_s, start_s in zip(ends_s, starts_s, strict=False)],
    )


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
        self.shapes.append(_shape(self._plans.popleft(), result))
        return result

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._plans.clear()
        self._executor.reset()


def _entering(limits: Limits, sampling: RowSampling) -> StepPlan:
    """A sequence enters every row, with blocks of its own for the longest context."""
    num_rows, per_row = limits.max_num_seqs, -(-longest_context(limits) // limits.block_size)
    return StepPlan(
        step_id=0,
        rows=Rows.decodes([0], [0], [0]),
        entries=tuple([RowEntry(row, row, 1, sampling) for row in range(num_rows)]),
        table_writes=tuple(
            [
                TableWrite(row, 0, tuple(range(1 + row * per_row, 1 + (row + 1) * per_row)))
                for row in range(num_rows)
            ]
        ),
    )


def _run(executor: Executor, plan: StepPlan) -> StepResult:
    executor.submit(plan)
    return executor.collect()


def _shape(plan: StepPlan, result: StepResult) -> StepShape:
    return shape_of(plan, padded_tokens=result.padded_tokens, padded_rows=result.padded_rows)
