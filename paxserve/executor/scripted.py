"""An executor without a model: the next token is a hash of what lies in the KV slots.

Owns: one number per KV slot. A step writes (token, position) into slots and samples by hashing all
slots of the context in table order, so that any mistake in tables, positions, chunks or preemption
changes tokens, and a correct scheduler cannot. In: plans. Out: results, exact under every policy.
"""

from collections import deque

import numpy as np

from paxserve.limits import Limits
from paxserve.step import NO_OUTPUT, RowOutput, RowPlan, StepPlan, StepResult

_UNWRITTEN = np.uint64(0)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


class Scripted:
    """Checks as it runs: every slot read was written, and no slot is written twice in a step.

    Args:
        limits: sizes of rows and pool.
        vocab_size: tokens are in [0, vocab_size).
        step_s: what a step says it took, in seconds.
    """

    def __init__(self, *, limits: Limits, vocab_size: int, step_s: float = 1.0) -> None:
        self._block_size = limits.block_size
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._slots = np.full(limits.num_blocks * limits.block_size, _UNWRITTEN)
        self._tables = np.zeros((limits.max_num_seqs, limits.blocks_per_row), np.int64)
        self._seeds = [0] * limits.max_num_seqs
        self._last_token = [-1] * limits.max_num_seqs
        self._in_flight: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Run the step now; its result waits for `collect`."""
        for entry in plan.entries:
            self._tables[entry.row] = 0
            self._last_token[entry.row] = -1
            self._seeds[entry.row] = entry.sampling.seed if entry.sampling.temperature else 0
        for write in plan.table_writes:
            end = write.start + len(write.block_ids)
            self._tables[write.row, write.start : end] = write.block_ids
        written = np.concatenate([self._write(row) for row in plan.rows])
        if len(np.unique(written)) != len(written) or (written < self._block_size).any():
            raise RuntimeError(f"step {plan.step_id} writes a slot twice, or the null block")
        outputs = tuple(self._sample(row) if row.num_samples else NO_OUTPUT for row in plan.rows)
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
        """The oldest result."""
        return self._in_flight.popleft()

    def _slot_ids(self, row: RowPlan, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = self._tables[row.row, positions // self._block_size]
        slots: np.ndarray = blocks * self._block_size + positions % self._block_size
        return slots

    def _write(self, row: RowPlan) -> np.ndarray:
        tokens = row.tokens or (self._last_token[row.row],)
        if len(tokens) != row.num_tokens or min(tokens) < 0:
            raise RuntimeError(f"row {row} has no {row.num_tokens} input tokens: {tokens}")
        end = row.first_position + row.num_tokens
        slots = self._slot_ids(row, row.first_position, end)
        positions = np.arange(row.first_position, end, dtype=np.uint64)
        self._slots[slots] = _mix(np.asarray(tokens, np.uint64) + _mix(positions))
        return slots

    def _sample(self, row: RowPlan) -> RowOutput:
        end = row.first_position + row.num_tokens
        read = self._slots[self._slot_ids(row, 0, end)]
        if (read == _UNWRITTEN).any():
            raise RuntimeError(f"sequence {row.sequence_id} reads a slot that was never written")
        order = np.arange(1, end + 1, dtype=np.uint64)
        digest = _mix((read * order).sum(keepdims=True) + np.uint64(self._seeds[row.row]))
        token = int(digest[0] % np.uint64(self._vocab_size))
        self._last_token[row.row] = token
        return RowOutput((token,))


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread 64-bit values (splitmix-like); zero is kept out, since it means unwritten."""
    mixed = (values + np.uint64(1)) * _MIX
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX
    return mixed | np.uint64(1)
