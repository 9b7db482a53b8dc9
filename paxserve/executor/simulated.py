"""An executor that only says how long a step would take.

Owns: the shape that would run, padded or not, and tokens that stand for the real ones. In: plans.
Out: results whose duration is the sum of a cost model's terms. It says nothing of content: a
sequence repeats one token of its own, so only what was in the prompts can be found again in a
prefix cache, and what a request produced itself. Must not know: policies, requests.
"""

from collections import deque

import numpy as np

from paxserve.cost_model import Costs
from paxserve.device.buckets import Bucket, Buckets, Exact
from paxserve.hash_model import mix, token_logprobs
from paxserve.limits import Limits
from paxserve.step import NO_OUTPUT, DecodeRows, RowOutput, StepPlan, StepResult
from paxserve.step_shape import shape_of

NOTHING = Bucket(0, 0)


class Simulated:
    """The `terms` of its results' `terms_s` have these names.

    Args:
        limits: sizes of rows and pool.
        vocab_size: tokens are in [0, vocab_size).
        costs: how long a step takes.
        bytes_per_block: what a swap moves, on all devices together.
        buckets: the shapes that an engine would pad to.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        vocab_size: int,
        costs: Costs,
        bytes_per_block: int,
        buckets: Buckets | Exact,
    ) -> None:
        self.terms = costs.terms
        self.bytes_per_block = bytes_per_block
        self._cost_of = costs.of
        self._vocab_size = vocab_size
        self._buckets = buckets
        self._outputs = [NO_OUTPUT] * limits.max_num_seqs
        self._num_logprobs = [-1] * limits.max_num_seqs
        self._in_flight: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Say what the step takes; its result waits for `collect`."""
        for entry in plan.entries:
            token = _digest(entry.sequence_id, 0) % self._vocab_size
            self._outputs[entry.row] = RowOutput((token,))
            self._num_logprobs[entry.row] = entry.sampling.num_logprobs
        num_tokens, num_rows = plan.num_tokens, len(plan.rows)
        padded = NOTHING  # runs where there are only swaps
        if num_rows:
            padded = self._buckets.choose(num_tokens=num_tokens, num_rows=num_rows)
        shape = shape_of(plan, padded_tokens=padded.num_tokens, padded_rows=padded.num_rows)
        terms_s = self._cost_of(shape)
        self._in_flight.append(
            StepResult(
                step_id=plan.step_id,
                outputs=tuple(self._outputs_of(plan)),
                duration_s=sum(terms_s),
                padded_tokens=padded.num_tokens,
                padded_rows=padded.num_rows,
                swap_bytes=shape.num_swapped * self.bytes_per_block,
                terms_s=terms_s,
            )
        )

    def collect(self) -> StepResult:
        """The oldest result."""
        return self._in_flight.popleft()

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._in_flight.clear()

    def _outputs_of(self, plan: StepPlan) -> list[RowOutput]:
        outputs = self._outputs
        if max(self._num_logprobs) < 0:
            if isinstance(plan.rows, DecodeRows):
                return [outputs[place] for place in plan.rows.places]
            return [outputs[row.row] if row.num_samples else NO_OUTPUT for row in plan.rows]
        found = []
        for row in plan.rows:
            output, num = outputs[row.row] if row.num_samples else NO_OUTPUT, -1
            if output.tokens and (num := self._num_logprobs[row.row]) >= 0:
                digest = _digest(row.sequence_id, row.first_position + row.num_tokens)
                (token,) = output.tokens
                logprobs = token_logprobs(digest, token, num=num, vocab_size=self._vocab_size)
                output = output._replace(logprobs=(logprobs,))
            found.append(output)
        return found


def _digest(sequence_id: int, position: int) -> int:
    values = np.array([sequence_id], np.uint64) + mix(np.array([position], np.uint64))
    return int(mix(values)[0])
