"""An executor without a model: the next token is a hash of what lies in the KV slots.

Owns: one number per KV slot, on the device and in the host's pool. A step writes (token, position)
into slots and samples by hashing all slots of the context in table order, so that any mistake in
tables, positions, chunks, copies, swaps or preemption changes tokens, and a correct scheduler
cannot. It runs on the same packed arrays as the model, so packing is under the same law. In:
plans. Out: results, exact under every policy.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from paxserve.arrays import StepArrays
from paxserve.device.buckets import Exact
from paxserve.hash_model import UNWRITTEN, kv_values, mix, token_logprobs
from paxserve.limits import Limits
from paxserve.pack import Packer, Variant
from paxserve.step import NO_OUTPUT, BlockCopy, RowOutput, StepPlan, StepResult

_ROWS_AT_ONCE = 32  # keeps the arrays of long contexts in a core's own cache


class Scripted:
    """Checks as it runs: every slot read was written, no slot is written twice in a step, and a
    row that writes nothing finds in its slot what it would have written.

    Args:
        limits: sizes of rows and pool.
        vocab_size: tokens are in [0, vocab_size).
        step_s: what a step says it took, in seconds.
        num_host_blocks: blocks that swaps may use on the host, numbered from 0.
        poison: a block that was swapped reads as unwritten at once, so that a request which
            resumes on a stale copy is noticed.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        vocab_size: int,
        step_s: float = 1.0,
        num_host_blocks: int = 0,
        poison: bool = False,
    ) -> None:
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size must be an integer >= 1, got {vocab_size!r}")
        if not isinstance(step_s, int | float) or not 0 < step_s < math.inf:
            raise ValueError(f"step_s must be a number of seconds > 0, got {step_s!r}")
        if not isinstance(num_host_blocks, int) or num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be an integer >= 0, got {num_host_blocks!r}")
        self._block_size = limits.block_size
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._poison = poison
        self._blocks = np.full((limits.num_blocks, limits.block_size), UNWRITTEN)
        self._host_blocks = np.full((num_host_blocks, limits.block_size), UNWRITTEN)
        self._slots = self._blocks.reshape(-1)  # a view
        self._last_sampled = np.full(limits.max_num_seqs, -1, np.int64)
        self._num_logprobs = [-1] * limits.max_num_seqs
        self._packer = Packer(limits=limits, buckets=Exact(), num_slots=len(self._slots))
        self._in_flight: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Run the step now; its result waits for `collect`."""
        for entry in plan.entries:
            self._last_sampled[entry.row] = -1
            self._num_logprobs[entry.row] = entry.sampling.num_logprobs
        self._check_inputs(plan)
        self._move_blocks(plan)
        outputs = self._outputs(plan) if plan.rows else []
        self._in_flight.append(
            StepResult(
                step_id=plan.step_id,
                outputs=tuple(outputs),
                duration_s=self._step_s,
                padded_tokens=plan.num_tokens,
                padded_rows=len(plan.rows),
                swap_bytes=(len(plan.swap_out) + len(plan.swap_in)) * self.bytes_per_block,
            )
        )

    def collect(self) -> StepResult:
        """The oldest result."""
        return self._in_flight.popleft()

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._in_flight.clear()

    @property
    def bytes_per_block(self) -> int:
        """What a swap moves: 8 bytes a slot."""
        return self._block_size * self._slots.itemsize

    def _outputs(self, plan: StepPlan) -> list[RowOutput]:
        packed = self._packer.pack(plan)
        arrays = packed.arrays
        self._write(plan, arrays)
        sums = self._sums(plan, arrays)
        tokens = mix(sums + self._seeds(arrays)) % np.uint64(self._vocab_size)
        samples = np.array([row.num_samples > 0 for row in plan.rows])
        self._last_sampled[arrays.row_ids[samples]] = tokens[samples]
        outputs = [
            RowOutput((token,)) if row.num_samples else NO_OUTPUT
            for row, token in zip(plan.rows, tokens.tolist(), strict=True)
        ]
        if packed.variant is Variant.LOGPROBS:
            return self._with_logprobs(plan, outputs, mix(sums).tolist())
        return outputs

    def _check_inputs(self, plan: StepPlan) -> None:
        for row in plan.rows:
            tokens = row.tokens or (self._last_sampled[row.row],)
            if len(tokens) != row.num_tokens or min(tokens) < 0:
                raise RuntimeError(f"{row} has no {row.num_tokens} input tokens: {tokens}")
        for place in plan.unwritten:
            if plan.rows[place].num_tokens != 1:
                raise RuntimeError(f"{plan.rows[place]} is unwritten: it must have one token")

    def _move_blocks(self, plan: StepPlan) -> None:
        device, host = self._blocks, self._host_blocks
        _move(plan.swap_out, device, host, lowest=(1, 0), poison=self._poison)
        _move(plan.swap_in, host, device, lowest=(0, 1), poison=self._poison)
        chained = {c.source for c in plan.copies} & {c.target for c in plan.copies}
        if chained:
            raise RuntimeError(f"blocks {sorted(chained)} are source and target: {plan.copies}")
        _move(plan.copies, device, device, lowest=(1, 1), poison=False)

    def _write(self, plan: StepPlan, arrays: StepArrays) -> None:
        fed_back = self._last_sampled[arrays.row_ids[arrays.token_rows]]
        tokens = np.where(arrays.token_ids < 0, fed_back, arrays.token_ids)
        values = kv_values(tokens, arrays.positions)
        written = arrays.slots != len(self._slots)
        slots = arrays.slots[written]
        if len(np.unique(slots)) != len(slots) or (slots < self._block_size).any():
            raise RuntimeError(f"a step writes a slot twice, or the null block: {slots.tolist()}")
        self._slots[slots] = values[written]
        for place in plan.unwritten:
            self._check_present(plan, arrays, place, values)

    def _check_present(
        self, plan: StepPlan, arrays: StepArrays, place: int, values: np.ndarray
    ) -> None:
        """An unwritten row's token lies in its slot already."""
        index = arrays.last_tokens[place]
        block, offset = divmod(int(arrays.positions[index]), self._block_size)
        if self._blocks[arrays.block_table[place, block], offset] != values[index]:
            raise RuntimeError(f"{plan.rows[place]} is unwritten, but its slot holds another token")

    def _sums(self, plan: StepPlan, arrays: StepArrays) -> np.ndarray:
        """A number per row, from every slot of its context."""
        groups = range(0, len(plan.rows), _ROWS_AT_ONCE)
        sums = [self._context_sums(plan, arrays, slice(i, i + _ROWS_AT_ONCE)) for i in groups]
        return np.concatenate(sums)

    def _context_sums(self, plan: StepPlan, arrays: StepArrays, group: slice) -> np.ndarray:
        """Per row of the group, the sum over its context of value x (position + 1)."""
        lengths, tables = arrays.context_lens[group], arrays.block_table[group]
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(rows)) - starts[rows]
        blocks, offsets = np.divmod(positions, self._block_size)
        read = self._slots[tables[rows, blocks] * self._block_size + offsets]
        if (read == UNWRITTEN).any():
            row = plan.rows[group][rows[read == UNWRITTEN][0]]
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

    def _with_logprobs(
        self, plan: StepPlan, outputs: list[RowOutput], digests: list[int]
    ) -> list[RowOutput]:
        """Log-probabilities for the rows that ask; like a model's, they do not know the seed."""
        found = []
        for row, output, digest in zip(plan.rows, outputs, digests, strict=True):
            num = self._num_logprobs[row.row]
            logprobs = (
                token_logprobs(digest, token, num=num, vocab_size=self._vocab_size)
                for token in (output.tokens if num >= 0 else ())
            )
            found.append(output._replace(logprobs=tuple(logprobs)))
        return found


def _move(
    moves: Sequence[BlockCopy],
    sources: np.ndarray,
    targets: np.ndarray,
    *,
    lowest: tuple[int, int],
    poison: bool,
) -> None:
    """Copy whole blocks between two pools; `lowest` are their first block ids (0 is null)."""
    if not moves:
        return
    ids = np.array(moves)
    if (ids < lowest).any() or (ids >= (len(sources), len(targets))).any():
        raise RuntimeError(f"a source or target is not in its pool: {list(moves)}")
    if len(np.unique(ids[:, 1])) != len(moves):
        raise RuntimeError(f"two blocks are copied to one target: {list(moves)}")
    targets[ids[:, 1]] = sources[ids[:, 0]]
    if poison:
        sources[ids[:, 0]] = UNWRITTEN
