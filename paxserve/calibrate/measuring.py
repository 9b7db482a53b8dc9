"""Times of designed steps on the real executor.

Owns: in what order they are measured. In: a warm executor, probes. Out: shapes, seconds. Must not
know: what is fitted to them.

Probes are measured in rounds, each in an order of its own, so that a machine that gets slower does
so for all of them.
"""

from collections.abc import Sequence

import numpy as np

from paxserve.calibrate.probes import Probe
from paxserve.executor import Executor
from paxserve.experiment import Progress
from paxserve.limits import Limits
from paxserve.step import RowEntry, Rows, RowSampling, StepPlan, StepResult, TableWrite
from paxserve.step_shape import StepShape, shape_of


def longest_context(limits: Limits) -> int:
    """Tokens that every row can have at once.

    Raises:
        ValueError: fewer than two, so that there is no step to measure.
    """
    per_row = min(limits.blocks_per_row, limits.num_usable_blocks // limits.max_num_seqs)
    longest = min(limits.max_model_len, per_row * limits.block_size)
    if longest < 2:
        raise ValueError(
            f"max_num_seqs={limits.max_num_seqs} rows need two tokens of KV each to be measured, "
            f"and there are {limits.num_usable_blocks} blocks of {limits.block_size} "
            f"(max_model_len={limits.max_model_len}): give the pool more, or lower max_num_seqs"
        )
    return longest


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
            shapes[i] = shape_that_ran(plan, result)
            seconds[i].append(result.duration_s)
            done += 1
    progress("steps measured", total, total)
    medians = [float(np.median(taken_s)) for taken_s in seconds]
    return [shapes[i] for i in range(len(probes))], medians


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


def shape_that_ran(plan: StepPlan, result: StepResult) -> StepShape:
    """The shape of a plan, padded as it was."""
    return shape_of(plan, padded_tokens=result.padded_tokens, padded_rows=result.padded_rows)
