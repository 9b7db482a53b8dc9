"""An executor without a model and without content: every sample is the same token.

For rows about memory alone, whose outputs end by length: nothing is packed, hashed or checked, so a
long run takes seconds. Rows about tokens run on `executor/scripted.py`. Owns: results in flight.
"""

from collections import deque

from paxserve.step import Outputs, StepPlan, StepResult


class Constant:
    """Each step takes `step_s`, whatever is in it."""

    def __init__(self, *, step_s: float = 1.0) -> None:
        self._step_s = step_s
        self._in_flight: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        outputs = Outputs([0 if num else None for num in plan.columns.num_samples])
        self._in_flight.append(
            StepResult(
                step_id=plan.step_id,
                outputs=outputs,
                duration_s=self._step_s,
                padded_tokens=plan.num_tokens,
                padded_rows=len(plan.rows),
            )
        )

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        return self._in_flight.popleft()

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._in_flight.clear()
