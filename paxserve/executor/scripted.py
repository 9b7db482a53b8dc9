"""An executor without a model: the next token is a hash of what lies in the KV slots.

Owns: one number per KV slot. A step writes (token, position) into slots and samples by hashing all
slots of the context in table order, so that any mistake in tables, positions, chunks or preemption
changes tokens, and a correct scheduler cannot. It runs on the same packed arrays as the model, so
packing is under the same law. In: plans. Out: results, exact under every policy.
"""

import math
from collections import deque

import numpy as np

from paxserve.arrays import StepArrays
from paxserve.device.buckets import Exact
from paxserve.limits import Limits
from paxserve.pack import Packer
from paxserve.step import NO_OUTPUT, RowOutput, StepPlan, StepResult

_UNWRITTEN = np.uint64(0)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_ROWS_AT_ONCE = 32  # keeps the arrays of long contexts in a core's own cache


class Scripted:
    """Checks as it runs: every slot read was written, and no slot is written twice in a step.

    Args:
        limits: sizes of rows and pool.
        vocab_size: tokens are in [0, vocab_size).
        step_s: what a step says it took, in seconds.
    """

    def __init__(self, *, limits: Limits, vocab_size: int, step_s: float = 1.0) -> None:
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size must be an integer >= 1, got {vocab_size!r}")
        if not isinstance(step_s, int | float) or not 0 < step_s < math.inf:
            raise ValueError(f"step_s must be a number of seconds > 0, got {step_s!r}")
        self._block_size = limits.block_size
        self._vocab_size = np.uint64(vocab_size)
        self._step_s = step_s
        num_slots = limits.num_blocks * limits.block_size
        self._slots = np.full(num_slots, _UNWRITTEN)
        self._last_sampled = np.full(limits.max_num_seqs, -1, np.int64)
        self._packer = Packer(limits=limits, buckets=Exact(), num_slots=num_slots)
        self._in_flight: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Run the step now; its result waits for `collect`."""
        for entry in plan.entries:
            self._last_sampled[entry.row] = -1
        self._check_inputs(plan)
        arrays = self._packer.pack(plan).arrays
        self._write(arrays)
        tokens = self._sample(plan, arrays)
        samples = np.array([row.num_samples > 0 for row in plan.rows])
        self._last_sampled[arrays.row_ids[samples]] = tokens[samples]
        outputs = [
            RowOutput((token,)) if row.num_samples else NO_OUTPUT
            for row, token in zip(plan.rows, tokens.tolist(), strict=True)
        ]
        self._in_flight.append(
            StepResult(
                step_id=plan.step_id,
                outputs=tuple(outputs),
                duration_s=self._step_s,
                padded_tokens=plan.num_tokens,
                padded_rows=len(plan.rows),
            )
        )

    def collect(self) -> StepResult:
        """The oldest result."""
        return self._in_flight.popleft()

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._in_flight.clear()

    def _check_inputs(self, plan: StepPlan) -> None:
        for row in plan.rows:
            tokens = row.tokens or (self._last_sampled[row.row],)
            if len(tokens) != row.num_tokens or min(tokens) < 0:
                raise RuntimeError(f"{row} has no {row.num_tokens} input tokens: {tokens}")

    def _write(self, arrays: StepArrays) -> None:
        fed_back = self._last_sampled[arrays.row_ids[arrays.token_rows]]
        tokens = np.where(arrays.token_ids < 0, fed_back, arrays.token_ids)
        slots = arrays.slots
        if len(np.unique(slots)) != len(slots) or slots.min() < self._block_size:
            raise RuntimeError(f"a step writes a slot twice, or the null block: {slots.tolist()}")
        positions = arrays.positions.astype(np.uint64)
        self._slots[slots] = _mix(tokens.astype(np.uint64) + _mix(positions))

    def _sample(self, plan: StepPlan, arrays: StepArrays) -> np.ndarray:
        """A token per row, from every slot of its context."""
        groups = range(0, len(plan.rows), _ROWS_AT_ONCE)
        sums = [self._context_sums(plan, arrays, slice(i, i + _ROWS_AT_ONCE)) for i in groups]
        digests = _mix(np.concatenate(sums) + self._seeds(arrays))
        tokens: np.ndarray = (digests % self._vocab_size).astype(np.int64)
        return tokens

    def _context_sums(self, plan: StepPlan, arrays: StepArrays, group: slice) -> np.ndarray:
        """Per row of the group, the sum over its context of value x (position + 1)."""
        lengths, tables = arrays.context_lens[group], arrays.block_table[group]
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(rows)) - starts[rows]
        blocks, offsets = np.divmod(positions, self._block_size)
        read = self._slots[tables[rows, blocks] * self._block_size + offsets]
        if (read == _UNWRITTEN).any():
            row = plan.rows[group][rows[read == _UNWRITTEN][0]]
            raise RuntimeError(f"sequence {row.sequence_id} reads a slot that was never written")
        sums: np.ndarray = np.add.reduceat(read * (positions + 1).astype(np.uint64), starts)
        return sums

    def _seeds(self, arrays: StepArrays) -> np.ndarray:
        """The seed of rows that sample at random, else 0."""
        if arrays.sampling is None:
            return np.zeros(len(arrays.context_lens), np.uint64)
        sampling = arrays.sampling
        seeds: np.ndarray = np.where(sampling.temperature > 0, sampling.seed, 0).astype(np.uint64)
        return seeds


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread 64-bit values (splitmix-like); zero is kept out, since it means unwritten."""
    mixed = (values + np.uint64(1)) * _MIX
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX
    return mixed | np.uint64(1)
