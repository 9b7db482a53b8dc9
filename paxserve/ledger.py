"""The slot ledger: at every step, which class does each KV slot belong to?

Owns: the classes, their count per step, and the split of what was reserved into what came to be
used and what did not (known only when a request ends, and then entered for all steps it spans).
In: the batch, once per executed step, before its results are applied. Out: `SlotCounts`
per step, which sum to the pool; columns for `slot_seconds.py`. Must not know: policies.

The slots of one running sequence:

    |<-- live -->|<-- reserved ahead ------------------>|<- tail ->|<- rounding ->|
                 |<- reserved_used ->|<- reserved_unused ->| of the   | of the
                   (its final length falls between)          last block | placement

A slot that several sequences share counts once, in `live`; its owners, each beyond the first, are
kept aside in `num_shared_owners`. Figure 2 of the vLLM paper: token states = live; reservation =
reserved_used; internal fragmentation = reserved_unused + tail; external = rounding + free_unfit.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paxserve.batch import Batch
from paxserve.request import Request, Sequence, State
from paxserve.slot_seconds import SlotSeconds
from paxserve.step import StepPlan


class SlotCounts(NamedTuple):
    """Slots per class, in slots of one KV position each.

    held: of finished requests that are not released (static batching), and of no one else. cached:
    of blocks that nobody holds and the prefix cache can find. free_unfit: free, but in no run long
    enough for the first waiting request. null: block 0.
    """

    live: int = 0
    reserved_used: int = 0
    reserved_unused: int = 0
    tail: int = 0
    rounding: int = 0
    held: int = 0
    cached: int = 0
    free_unfit: int = 0
    free: int = 0
    null: int = 0


@dataclass(slots=True)
class _Promise:
    """Steps [since, until) in which a sequence was promised `num_tokens`."""

    since: int
    until: int
    num_tokens: int


class _Sums(NamedTuple):
    """Over the sequences of running requests, each shared slot once."""

    live: int = 0
    promised: int = 0
    tail: int = 0
    num_blocks: int = 0


class Ledger:
    """Invariant: at every recorded step the counts sum to num_blocks * block_size."""

    def __init__(self, batch: Batch) -> None:
        self.num_shared_owners = array("q")
        self.largest_free_run = -1
        self._batch = batch
        self._counts = array("q")  # of all steps, 8 bytes a number
        self._unused_changes = array("q", [0])  # per step, of ended sequences: what ends unused
        self._promises: dict[Sequence, list[_Promise]] = {}
        self._most_computed: dict[Sequence, int] = {}
        self._slot_seconds = SlotSeconds()
        self._columns = np.zeros((4, 0))

    def record(self, duration_s: float = 0.0, plan: StepPlan | None = None) -> SlotCounts:
        """Count the slots as they are now, as one step; `reserved_used` is not split yet.

        Args:
            duration_s: how long the step took, for the slot-seconds of requests.
            plan: of the step, if the one before it was recorded too: after a step of decodes the
                counts follow from those before it.

        Raises:
            RuntimeError: the classes do not sum to the pool; every term is printed.
        """
        batch, block_size = self._batch, self._batch.limits.block_size
        pool = batch.pool
        self._spend(duration_s, plan)
        is_shared_with_dead = pool.num_extra_refs > 0 and bool(batch.finished or batch.dead)
        running = self._exactly(batch.running) if is_shared_with_dead else self._quickly()
        unfit = self._num_unfit_blocks() * block_size
        counts = SlotCounts(
            live=running.live,
            reserved_used=running.promised - running.live,
            tail=running.tail,
            rounding=running.num_blocks * block_size - running.promised - running.tail,
            held=self._num_blocks_of_the_dead() * block_size,
            cached=pool.num_cached * block_size,
            free_unfit=unfit,
            free=pool.num_free * block_size - unfit,
            null=block_size,
        )
        if sum(counts) != batch.limits.num_blocks * block_size or min(counts) < 0:
            raise RuntimeError(
                f"slot classes sum to {sum(counts)}, the pool has {batch.limits.num_blocks} blocks "
                f"of {block_size}: {counts}"
            )
        self._counts.extend(counts)
        self._unused_changes.append(0)
        self.num_shared_owners.append(pool.num_extra_refs * block_size)
        if batch.policies.placement.contiguous:
            self.largest_free_run = pool.free_space.largest_free_run()
        return counts

    def record_run(
        self, durations_s: SequenceOf[float], pools: SequenceOf[tuple[int, int, int]]
    ) -> np.ndarray:
        """Count several steps at once, as `record` would one by one, in which each running request
        computes one more token and takes no more blocks than that needs.

        Args:
            durations_s: of each step.
            pools: cached blocks, free blocks and further references during each step.

        Returns:
            Counts, i64 [steps, classes].
        """
        batch, block_size = self._batch, self._batch.limits.block_size
        num_cached, num_free, num_twice = np.array(pools, np.int64).T
        columns = np.repeat(self._columns[None], len(pools), axis=0)
        columns[:, 0] += np.arange(1, len(pools) + 1)[:, None]
        columns[:, 1] = np.maximum(columns[:, 0], columns[:, 1])
        columns[:, 3] = -columns[:, 1] % block_size
        columns[:, 2] = np.maximum(columns[:, 2], -(-columns[:, 0] // block_size) * block_size)
        self._columns = columns[-1]
        self._slot_seconds.spend_run(columns, np.array(durations_s))
        live, promised, held, tail = columns.sum(axis=2).astype(np.int64).T
        unfit = self._num_unfit_blocks() * block_size
        classes = {
            "live": live - num_twice * block_size,
            "reserved_used": promised - live,
            "tail": tail,
            "rounding": held - promised - tail,
            "cached": num_cached * block_size,
            "free_unfit": unfit,
            "free": num_free * block_size - unfit,
            "null": block_size,
        }
        counts = np.zeros((len(pools), len(SlotCounts._fields)), np.int64)
        for name, slots in classes.items():
            counts[:, SlotCounts._fields.index(name)] = slots
        if (counts.sum(axis=1) != batch.limits.num_blocks * block_size).any() or counts.min() < 0:
            raise RuntimeError(
                f"slot classes of a run of steps do not sum to the pool of "
                f"{batch.limits.num_blocks} blocks of {block_size}: {counts.tolist()}"
            )
        self._counts.frombytes(counts.tobytes())
        self._unused_changes.extend([0] * len(pools))
        self.num_shared_owners.extend((num_twice * block_size).tolist())
        return counts

    def steps(self) -> list[SlotCounts]:
        """Every step's counts; what is promised to a sequence still alive counts as to be used."""
        return list(map(SlotCounts._make, self.columns().tolist()))

    def columns(self) -> np.ndarray:
        """The same, i64 [steps, classes]."""
        for sequence in [s for s in self._promises if s.finish_reason is not None]:
            self._split(sequence)
        counts = np.frombuffer(self._counts, np.int64).reshape(-1, len(SlotCounts._fields)).copy()
        unused = np.cumsum(np.frombuffer(self._unused_changes, np.int64)[:-1])
        counts[:, SlotCounts._fields.index("reserved_used")] -= unused
        counts[:, SlotCounts._fields.index("reserved_unused")] += unused
        return counts

    def close(self, request: Request) -> None:
        """A request has ended and holds nothing any more: what was counted for it is final."""
        self._slot_seconds.close(request)
        for sequence in request.sequences:
            if sequence in self._promises:
                self._split(sequence)

    def _split(self, sequence: Sequence) -> None:
        """Enter what of the promises of an ended sequence was never used."""
        most_computed = self._most_computed.pop(sequence)
        for promise in self._promises.pop(sequence):
            unused = max(0, promise.num_tokens - most_computed)
            self._unused_changes[promise.since] += unused
            self._unused_changes[promise.until] -= unused

    def settle(self) -> None:
        """Hand every request the slot-seconds that were counted for it so far."""
        self._slot_seconds.settle()

    @property
    def _may_promise_ahead(self) -> bool:
        """Whether more may be held for a sequence than is computed."""
        return self._batch.tables.promises_ahead or self._batch.policies.placement.contiguous

    def _quickly(self) -> _Sums:
        """Request by request. What two requests share are full blocks, so each of their further
        holders counts `block_size` slots too many.
        """
        batch, block_size = self._batch, self._batch.limits.block_size
        num_twice = batch.pool.num_extra_refs
        for request in batch.groups:  # what a group shares within itself is counted once already
            held = [block_id for s in request.live for block_id in s.block_table]
            num_twice -= len(held) - len(set(held))
        live, promised, held_slots, tail = self._columns.sum(axis=1).tolist()
        return _Sums(
            live=int(live) - num_twice * block_size,
            promised=int(promised) - num_twice * block_size,
            tail=int(tail),
            num_blocks=int(held_slots) // block_size - num_twice,
        )

    def _exactly(self, requests: list[Request]) -> _Sums:
        """Block by block."""
        block_size = self._batch.limits.block_size
        filled: dict[int, int] = {}
        covered: dict[int, int] = {}
        for request in requests:
            for sequence in request.live:
                computed = 0 if sequence.source else sequence.num_computed_tokens
                promised = max(computed, sequence.num_reserved_tokens)
                for column, block_id in enumerate(sequence.block_table):
                    before = column * block_size
                    for tokens, counts in ((computed, filled), (promised, covered)):
                        here = min(block_size, max(0, tokens - before))
                        counts[block_id] = max(here, counts.get(block_id, 0))
        tail = sum([block_size - slots for slots in covered.values() if slots])
        return _Sums(sum(filled.values()), sum(covered.values()), tail, len(filled))

    def _num_blocks_of_the_dead(self) -> int:
        batch = self._batch
        dead = [s for request in batch.finished for s in request.live] + batch.dead
        if not dead:
            return 0
        held = {block_id for sequence in dead for block_id in sequence.block_table}
        if batch.pool.num_extra_refs:
            held -= {b for r in batch.running for s in r.live for b in s.block_table}
        return len(held)

    def _spend(self, duration_s: float, plan: StepPlan | None) -> None:
        """Columns of this step, one entry per running request, and slot-seconds from them."""
        running, block_size = self._batch.running, self._batch.limits.block_size
        is_same = self._slot_seconds.follow(running)
        if is_same and plan is not None and self._all_decoded(plan):
            columns = self._columns
            columns[:2] += 1
            columns[3] = -columns[1] % block_size
            columns[2] = columns[1] + columns[3]
        else:
            self._columns = columns = self._columns_of(running)
        if self.notes_promises:
            self.note_promises()
        self._slot_seconds.spend(columns, duration_s)
        self._spend_on_the_dead(duration_s)

    def _all_decoded(self, plan: StepPlan) -> bool:
        """Whether every running request has one token more than before, and nothing else changed:
        then it holds the blocks that its tokens fill.
        """
        batch, num_rows = self._batch, len(plan.rows)
        others = batch.groups or plan.entries or batch.finished or batch.dead
        is_plain = not others and not self._may_promise_ahead
        return is_plain and num_rows == len(batch.running) and num_rows == plan.num_tokens

    def _spend_on_the_dead(self, duration_s: float) -> None:
        """What finished requests and ended sequences hold until the batch dissolves is theirs."""
        batch = self._batch
        ended = [(request, s) for request in batch.finished for s in request.live]
        ended += [batch.by_sequence[sequence.sequence_id] for sequence in batch.dead]
        held: dict[Request, set[int]] = {}
        for request, sequence in ended:
            held.setdefault(request, set()).update(sequence.block_table)
        for request, blocks in held.items():
            if request.state is State.RUNNING:  # what its live sequences share is counted already
                blocks.difference_update(*[sequence.block_table for sequence in request.live])
            request.held_slot_s += len(blocks) * batch.limits.block_size * duration_s

    def _columns_of(self, running: list[Request]) -> np.ndarray:
        """[4, requests]: computed tokens, promised tokens, slots of all blocks and tail slots of
        each request, what it shares with others included.
        """
        batch, block_size = self._batch, self._batch.limits.block_size
        sequences = [request.live[0] for request in running]
        columns = np.empty((4, len(running)))
        columns[0] = [sequence.num_computed_tokens for sequence in sequences]
        columns[1] = columns[0]
        if self._may_promise_ahead:
            reserved = [sequence.num_reserved_tokens for sequence in sequences]
            columns[1] = np.maximum(columns[0], reserved)
        columns[2] = [len(sequence.block_table) for sequence in sequences]
        columns[2] *= block_size
        columns[3] = -columns[1] % block_size
        for i, request in enumerate(running) if batch.groups else ():
            if request in batch.groups:
                sums = self._exactly([request])
                columns[:, i] = (
                    sums.live,
                    sums.promised,
                    sums.num_blocks * block_size,
                    sums.tail,
                )
        return columns

    @property
    def notes_promises(self) -> bool:
        """Whether more is promised to somebody than is computed, or was."""
        live, promised = self._columns[0], self._columns[1]
        is_ahead = self._may_promise_ahead and bool((promised > live).any())
        return is_ahead or bool(self._promises)

    def note_promises(self, *, step: int = 0) -> None:
        """What is promised in a step, `step` after the next one that will be recorded."""
        for request in self._batch.running:
            for sequence in request.live:
                self._note_promise(sequence, len(self.num_shared_owners) + step)

    def _note_promise(self, sequence: Sequence, step: int) -> None:
        computed, reserved = sequence.num_computed_tokens, sequence.num_reserved_tokens
        if reserved <= computed and sequence not in self._promises:
            return
        promises = self._promises.setdefault(sequence, [])
        last = promises[-1] if promises else None
        if last and last.until == step and last.num_tokens == reserved:
            last.until = step + 1
        else:
            promises.append(_Promise(step, step + 1, reserved))
        self._most_computed[sequence] = max(self._most_computed.get(sequence, 0), computed)

    def _num_unfit_blocks(self) -> int:
        batch = self._batch
        head = batch.waiting.head()
        if head is None or not batch.policies.placement.contiguous:
            return 0
        longest = max([sequence.num_known_tokens for sequence in head.live])
        return batch.pool.free_space.num_unfit(batch.tables.num_blocks_needed(head, longest))
