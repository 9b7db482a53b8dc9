"""The slot ledger: at every step, which class does each KV slot belong to?

Owns: the classes, their count per step, and the split of what was reserved into what came to be
used and what did not (known only when a request ends, and then entered for all steps it spans).
In: the batch, once per executed step, before its results are applied. Out: `SlotCounts`
per step, which sum to the pool. Must not know: policies, time.

The slots of one running sequence:

    |<-- live -->|<-- reserved ahead ------------------>|<- tail ->|<- rounding ->|
                 |<- reserved_used ->|<- reserved_unused ->| of the   | of the
                   (its final length falls between)          last block | placement

`live` of a shared slot counts once. Figure 2 of the vLLM paper: token states = live; reservation =
reserved_used; internal fragmentation = reserved_unused + tail; external = rounding + free_unfit.
"""

from dataclasses import dataclass
from typing import NamedTuple

from paxserve.batch import Batch
from paxserve.request import Request, State


class SlotCounts(NamedTuple):
    """Slots per class, in slots of one KV position each.

    held: of finished requests that are not released (static batching). free_unfit: free, but in no
    run long enough for the first waiting request. null: block 0.
    """

    live: int = 0
    reserved_used: int = 0
    reserved_unused: int = 0
    tail: int = 0
    rounding: int = 0
    held: int = 0
    free_unfit: int = 0
    free: int = 0
    null: int = 0


@dataclass(slots=True)
class _Promise:
    """Steps [since, until) in which a request's sequences were promised `num_tokens` each."""

    since: int
    until: int
    num_tokens: int
    num_sequences: int


class Ledger:
    """Invariant: at every recorded step the counts sum to num_blocks * block_size."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._steps: list[SlotCounts] = []
        self._promises: dict[Request, list[_Promise]] = {}
        self._most_computed: dict[Request, int] = {}

    def record(self) -> SlotCounts:
        """Count the slots as they are now, as one step; `reserved_used` is not split yet.

        Raises:
            RuntimeError: the classes do not sum to the pool; every term is printed.
        """
        batch, block_size = self._batch, self._batch.limits.block_size
        live = promised = num_blocks = tail = 0
        for request in batch.running:
            for sequence in request.sequences:
                computed, reserved = sequence.num_computed_tokens, sequence.num_reserved_tokens
                covered = reserved if reserved > computed else computed
                live += computed
                promised += covered
                tail += -covered % block_size
                num_blocks += len(sequence.block_table)
            if reserved > computed or request in self._promises:
                self._note_promise(request)
        free = batch.pool.num_free * block_size
        unfit = self._num_unfit_blocks() * block_size
        counts = SlotCounts(
            live=live,
            reserved_used=promised - live,
            tail=tail,
            rounding=num_blocks * block_size - promised - tail,
            held=sum([len(s.block_table) for r in batch.finished for s in r.sequences])
            * block_size,
            free_unfit=unfit,
            free=free - unfit,
            null=block_size,
        )
        if sum(counts) != batch.limits.num_blocks * block_size or min(counts) < 0:
            raise RuntimeError(
                f"slot classes sum to {sum(counts)}, the pool has {batch.limits.num_blocks} blocks "
                f"of {block_size}: {counts}"
            )
        self._steps.append(counts)
        return counts

    def steps(self) -> list[SlotCounts]:
        """Every step's counts; what is promised to a request still alive counts as to be used."""
        changes = [0] * (len(self._steps) + 1)
        for request, promises in self._promises.items():
            if request.state is not State.FINISHED:
                continue
            for promise in promises:
                unused = max(0, promise.num_tokens - self._most_computed[request])
                changes[promise.since] += unused * promise.num_sequences
                changes[promise.until] -= unused * promise.num_sequences
        unused, split = 0, []
        for counts, change in zip(self._steps, changes, strict=False):
            unused += change
            ahead = counts.reserved_used
            split.append(counts._replace(reserved_used=ahead - unused, reserved_unused=unused))
        return split

    def _note_promise(self, request: Request) -> None:
        step, sequence = len(self._steps), request.sequence
        promises = self._promises.setdefault(request, [])
        last = promises[-1] if promises else None
        if last and last.until == step and last.num_tokens == sequence.num_reserved_tokens:
            last.until = step + 1
        else:
            promises.append(
                _Promise(step, step + 1, sequence.num_reserved_tokens, len(request.sequences))
            )
        most = self._most_computed.get(request, 0)
        self._most_computed[request] = max(most, sequence.num_computed_tokens)

    def _num_unfit_blocks(self) -> int:
        batch = self._batch
        head = batch.waiting.head()
        if head is None:
            return 0
        num_needed = batch.tables.num_blocks_needed(head, head.num_remaining_tokens)
        return batch.pool.free_space.num_unfit(num_needed * len(head.sequences))
