"""How a running request makes way: by giving back this step's grant, then its memory and row.

Owns: taking back grants, and the choice between recompute and swap as it really turns out. In: a
victim. Out: changes of the batch and of the draft. Must not know: who needs the room.
"""

from paxserve.batch import Batch
from paxserve.draft import StepDraft
from paxserve.events import EventLog, Kind
from paxserve.policies import Policies
from paxserve.preemption import Method, VictimView
from paxserve.request import Request
from paxserve.step import BlockCopy


class Preempting:
    """Works on one step's draft."""

    def __init__(
        self, *, batch: Batch, policies: Policies, draft: StepDraft, events: EventLog
    ) -> None:
        self._batch = batch
        self._policies = policies
        self._draft = draft
        self._events = events

    def preempt(self, victim: Request, *, why: str = "") -> None:
        """A running request waits again. One that entered in this step never ran: it is held back,
        not preempted.
        """
        draft = self._draft
        if victim in draft.newcomers:
            self._hold_back(victim)
            return
        self._take_back(victim)
        blocks, num_slots = self._batch.tables.footprint(victim)
        method, note = self._method(victim, blocks, num_slots)
        is_swap = method is Method.SWAP
        if is_swap:
            self._swap_out(victim, blocks)
        detail = ", ".join(filter(None, (str(method), note, why)))
        self._batch.preempt(
            victim,
            num_lost_tokens=0 if is_swap else num_slots,
            method=detail,
            keeps_computed=is_swap,
        )
        draft.dropped.add(victim)
        draft.num_preempted += 1

    def drop(self, request: Request) -> None:
        """A running request is about to end: its grant of this step goes back."""
        self._take_back(request)
        self._draft.newcomers.pop(request, None)
        self._batch.give_back_host_blocks(request)
        self._draft.dropped.add(request)

    def _hold_back(self, newcomer: Request) -> None:
        self._take_back(newcomer)
        del self._draft.newcomers[newcomer]
        is_swapped = bool(newcomer.live[0].host_blocks)
        self._batch.withdraw(newcomer, keeps_computed=is_swapped)
        self._draft.dropped.add(newcomer)
        self._draft.num_preempted += 1
        self._events.add(
            Kind.HELD_BACK,
            newcomer.request_id,
            num_tokens=newcomer.num_remaining_tokens,
            detail="blocks",
        )

    def _take_back(self, request: Request) -> None:
        """Undo what this step has granted to a request."""
        draft, tables = self._draft, self._batch.tables
        published = draft.published.pop(request, ())
        for block_id in published:
            for reader in draft.hits.pop(block_id, ()):
                if reader in draft.newcomers and reader is not request:
                    self._hold_back(reader)
        self._batch.pool.unpublish(published)
        for sequence in request.live:
            tables.forget_copies(sequence)
            draft.touched.pop(sequence.sequence_id, None)
            draft.unwritten.discard(sequence.sequence_id)
            row = draft.rows.pop(sequence.sequence_id)
            draft.chunks.pop(sequence.sequence_id, None)
            if row is not None:
                draft.budget_left += row.num_tokens
                sequence.num_computed_tokens -= row.num_tokens
                sequence.num_remaining_tokens += row.num_tokens - row.num_samples
            source = draft.started.pop(sequence, None)
            if source is not None:
                tables.let_go(sequence)
                sequence.source = source

    def _method(self, victim: Request, blocks: list[int], num_slots: int) -> tuple[Method, str]:
        num_free = self._batch.host_pool.num_free
        view = VictimView(num_slots, len(blocks), num_free)
        method = self._policies.preemption.choose(victim, view)
        if not isinstance(method, Method):
            raise RuntimeError(
                f"{type(self._policies.preemption).__name__} answered {method!r}, which is no "
                f"preemption method: answer one of {list(Method)}"
            )
        if method is Method.SWAP and len(blocks) > num_free:
            note = f"swap needs {len(blocks)} host blocks, {num_free} are free"
            return Method.RECOMPUTE, note
        return (Method.RECOMPUTE, "") if not blocks else (method, "")

    def _swap_out(self, victim: Request, blocks: list[int]) -> None:
        host_blocks = self._batch.host_pool.take(len(blocks))
        assert host_blocks is not None
        host_of = dict(zip(blocks, host_blocks, strict=True))
        self._draft.swap_out += [BlockCopy(*pair) for pair in host_of.items()]
        for sequence in victim.live:
            if sequence.source is None:
                computed = self._batch.tables.computed_blocks(sequence)
                sequence.host_blocks = [host_of[block_id] for block_id in computed]
