"""An executor that only says how long a step would take.

Owns: the shape that would run, padded or not, and tokens that stand for the real ones. In: plans.
Out: results whose duration is the sum of a cost model's terms. It says nothing of content: a
sequence repeats one token of its own, so only what was in the prompts can be found again in a
prefix cache, and what a request produced itself. Must not know: policies, requests.
"""

from collections import deque
from math import inf

from paxserve.cost_model import Costs
from paxserve.device.buckets import Bucket, Buckets, Exact
from paxserve.executor import Repeats
from paxserve.hash_model import mix_one, token_logprobs
from paxserve.limits import Limits
from paxserve.step import Outputs, RowPlan, Rows, StepPlan, StepResult, TokenLogprobs
from paxserve.step_shape import StepShape, shape_of

NOTHING = Bucket(0, 0)


class Simulated:
    """The `terms` of its results' `terms_s` have these names.

    Args:
        limits: sizes of rows and pool.
        vocab_size: tokens are in [0, vocab_size).
        costs: how long a step takes.
        bytes_per_block: what a swap moves, on all devices together.
        buckets: the shapes that an engine would pad to.
        leaps: whether it tells how steps repeat, so that they need not be planned one by one.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        vocab_size: int,
        costs: Costs,
        bytes_per_block: int,
        buckets: Buckets | Exact,
        leaps: bool = True,
    ) -> None:
        self.terms = costs.terms
        self.bytes_per_block = bytes_per_block
        self._cost_of = costs.of
        self._vocab_size = vocab_size
        self._leaps = leaps
        self._buckets = buckets
        self._table_width = 0 if isinstance(buckets, Exact) else limits.blocks_per_row
        self._tokens = [0] * limits.max_num_seqs
        self._num_logprobs: dict[int, int] = {}  # of the rows that want any
        self._in_flight: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Say what the step takes; its result waits for `collect`."""
        for entry in plan.entries:
            self._tokens[entry.row] = _digest(entry.sequence_id, 0) % self._vocab_size
            self._num_logprobs.pop(entry.row, None)
            if entry.sampling.num_logprobs >= 0:
                self._num_logprobs[entry.row] = entry.sampling.num_logprobs
        num_tokens, num_rows = plan.num_tokens, len(plan.rows)
        padded = NOTHING  # runs where there are only swaps
        if num_rows:
            padded = self._buckets.choose(num_tokens=num_tokens, num_rows=num_rows)
        shape = shape_of(plan, padded_tokens=padded.num_tokens, padded_rows=padded.num_rows)
        terms_s = self._terms_s(shape)
        self._in_flight.append(
            StepResult(
                step_id=plan.step_id,
                outputs=self._outputs(plan.columns),
                duration_s=sum(terms_s),
                padded_tokens=padded.num_tokens,
                padded_rows=padded.num_rows,
                padded_blocks=padded.num_rows * self._table_width,
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

    def repeats(self, rows: Rows) -> Repeats | None:
        """See `Repeating.repeats`."""
        if not self._leaps or self._num_logprobs:
            return None
        num = len(rows)
        padded = self._buckets.choose(num_tokens=num, num_rows=num)
        context = sum(rows.first_positions) + num

        def terms_s(num_further: int) -> tuple[float, ...]:
            further = context + num_further * num
            return self._terms_s(
                StepShape(num, num, padded.num_tokens, padded.num_rows, num, num, further)
            )

        tokens = [self._tokens[place] for place in rows.places]
        return Repeats(tokens, terms_s, padded.num_tokens, padded.num_rows)

    def _terms_s(self, shape: StepShape) -> tuple[float, ...]:
        """What the cost model says, which may be somebody's own."""
        terms_s = self._cost_of(shape)
        if len(terms_s) != len(self.terms):
            raise ValueError(f"the cost model has the terms {self.terms} and gave {terms_s!r}")
        if not (min(terms_s) >= 0 and sum(terms_s) < inf):  # NaN is neither
            said = dict(zip(self.terms, terms_s, strict=True))
            raise ValueError(
                f"the cost model gave no times (finite, at least 0 s): {said} for {shape}"
            )
        return terms_s

    def _outputs(self, rows: Rows) -> Outputs:
        tokens = self._tokens
        sampled: list[int | None] = [tokens[place] for place in rows.places]
        if not all(rows.num_samples):
            columns = zip(sampled, rows.num_samples, strict=True)
            sampled = [token if num else None for token, num in columns]
        if not self._num_logprobs:
            return Outputs(sampled)
        asked = zip(rows, sampled, strict=True)
        return Outputs(sampled, [self._logprobs(row, token) for row, token in asked])

    def _logprobs(self, row: RowPlan, token: int | None) -> tuple[TokenLogprobs, ...]:
        num = self._num_logprobs.get(row.row, -1)
        if token is None or num < 0:
            return ()
        digest = _digest(row.sequence_id, row.first_position + row.num_tokens)
        return (token_logprobs(digest, token, num=num, vocab_size=self._vocab_size),)


def _digest(sequence_id: int, position: int) -> int:
    return mix_one(sequence_id + mix_one(position))
