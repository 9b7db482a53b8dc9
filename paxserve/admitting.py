"""How a waiting request gets rows and memory: what it finds cached, what the gates say, what it
shares, what comes back from the host.

Owns: the order of these questions. In: a waiting request. Out: it has entered, or a reason why not
and nothing changed. Must not know: whom to preempt for it, batching policies.
"""

from typing import NamedTuple

from paxserve.batch import Batch
from paxserve.batching import Reason
from paxserve.draft import StepDraft
from paxserve.events import EventLog, Kind
from paxserve.forks import Claim, num_grantable, plan_forks, spread
from paxserve.gate import MemoryView
from paxserve.request import Request, Sequence, set_computed
from paxserve.step import BlockCopy


class Refusal(NamedTuple):
    """Why a request does not enter; `why` is the words of a gate."""

    reason: Reason
    why: str = ""


class Admitting:
    """Works on one step's draft."""

    def __init__(self, *, batch: Batch, draft: StepDraft, events: EventLog) -> None:
        self._batch = batch
        self._draft = draft
        self._events = events

    def admit(
        self, request: Request, num_tokens: int, *, num_budget: int, computes: bool = True
    ) -> list[Claim] | Refusal:
        """Rows for every live sequence, and memory for at most `num_tokens` tokens.

        Args:
            request: a waiting one.
            num_tokens: what is wanted; what the prefix cache has is not counted.
            num_budget: tokens that may be computed for it.
            computes: whether they will be, in this step; else sequences that take over the blocks
                of another wait for that.

        Returns:
            What each of its sequences may compute.
        """
        if request in self._draft.dropped:
            return Refusal(Reason.BLOCKS)
        if num_budget < 1:
            return Refusal(Reason.BUDGET)
        if len(request.live) > len(self._batch.free_rows):
            return Refusal(Reason.ROWS)
        hits = self._open(request)
        answer = self._claim(request, num_tokens, num_budget, hits, computes=computes)
        if isinstance(answer, Refusal):
            self._close(request)
        else:
            self._batch.enter(request)
        return answer

    def _open(self, request: Request) -> list[int]:
        """Count as computed what the cache has and what the sequences share; returns the blocks
        that were found.
        """
        trunk = request.live[0]
        if trunk.host_blocks:
            return []
        block_size = self._batch.limits.block_size
        hits = self._batch.pool.index.match(
            trunk.token_ids,
            salt=request.origin.cache_salt,
            num_blocks=(trunk.num_known_tokens - 1) // block_size,
        )
        set_computed(trunk, len(hits) * block_size)
        if len(request.live) > 1 and self._batch.policies.shares:
            plan_forks(request, block_size=block_size)
        return hits

    def _close(self, request: Request) -> None:
        if request.live[0].host_blocks:
            return
        for sequence in request.live:
            set_computed(sequence, 0)
            sequence.source = None

    def _claim(
        self,
        request: Request,
        num_tokens: int,
        num_budget: int,
        hits: list[int],
        *,
        computes: bool,
    ) -> list[Claim] | Refusal:
        tables, pool = self._batch.tables, self._batch.pool
        largest_step = self._batch.limits.max_num_batched_tokens
        num_tokens = num_grantable(
            request, num_tokens, num_budget=num_budget, largest_step=largest_step
        )
        if not num_tokens:
            return Refusal(Reason.BUDGET)
        claims = spread(request, num_tokens)
        if not computes:
            claims = [claim for claim in claims if claim.sequence.source is None]
        restored = [s for s in request.live if s.host_blocks]
        num_twice = _num_blocks_twice(restored)
        claimed = {claim.sequence for claim in claims}
        all_claims = claims + [Claim(s, 0) for s in restored if s not in claimed]
        if self._batch.policies.placement.contiguous:  # a run begun for a chunk may never grow
            all_claims = [Claim(s, s.num_remaining_tokens) for s in request.live]
        num_free = pool.num_available - pool.num_unheld(hits)
        num_needed = tables.num_missing_blocks(request, all_claims) - len(hits) - num_twice
        if self._batch.gates:
            why = self._batch.gates.refusal(
                request, self._memory_view(request, num_free, num_needed, len(hits), num_twice)
            )
            if why is not None:
                return Refusal(Reason.GATE, why)
        if num_needed > num_free:
            return Refusal(Reason.BLOCKS)
        swap_in = self._hold(request, all_claims, hits)
        if swap_in is None:
            return Refusal(Reason.BLOCKS)
        self._draft.newcomers[request] = swap_in
        self._note_hits(request, hits)
        return claims

    def _memory_view(
        self, request: Request, num_free: int, num_needed: int, num_hits: int, num_twice: int
    ) -> MemoryView:
        tables, limits = self._batch.tables, self._batch.limits
        everything = spread(request, request.num_remaining_tokens)
        return MemoryView(
            num_usable=limits.num_usable_blocks,
            num_free=num_free,
            num_needed=num_needed,
            num_needed_for_all=tables.num_missing_blocks(request, everything)
            - num_hits
            - num_twice,
            num_cached_tokens=num_hits * limits.block_size,
            block_size=limits.block_size,
            running=tuple(self._batch.running),
        )

    def _hold(
        self, request: Request, claims: list[Claim], hits: list[int]
    ) -> list[BlockCopy] | None:
        """Blocks for every claim, shared ones first; returns what must be swapped in, or None and
        nothing is held.
        """
        tables, pool = self._batch.tables, self._batch.pool
        num_evicted = pool.num_evicted
        if hits:
            tables.share(request.live[0], hits, is_hit=True)
            request.live[0].num_published_blocks = len(hits)
        device_of: dict[int, int] = {}
        swap_in: list[BlockCopy] = []
        by_place = {s: place for place, s in enumerate(request.live)}
        for claim in sorted(claims, key=lambda claim: by_place[claim.sequence]):
            sequence = claim.sequence
            if sequence.host_blocks:
                known = [device_of[b] for b in sequence.host_blocks if b in device_of]
                tables.share(sequence, known, is_hit=False)
            if not tables.hold(request, [claim]):
                for held in reversed(request.live):
                    tables.let_go(held)
                return None
            for host_id, block_id in zip(sequence.host_blocks, sequence.block_table, strict=False):
                if host_id not in device_of:
                    device_of[host_id] = block_id
                    swap_in.append(BlockCopy(host_id, block_id))
            self._draft.touched[sequence.sequence_id] = sequence
        if pool.num_evicted > num_evicted:
            num_slots = (pool.num_evicted - num_evicted) * self._batch.limits.block_size
            self._events.add(Kind.EVICTED, request.request_id, num_tokens=num_slots)
        return swap_in

    def _note_hits(self, request: Request, hits: list[int]) -> None:
        request.num_cached_tokens = len(hits) * self._batch.limits.block_size
        published = {b for blocks in self._draft.published.values() for b in blocks}
        for block_id in published.intersection(hits):
            self._draft.hits.setdefault(block_id, []).append(request)


def _num_blocks_twice(sequences: list[Sequence]) -> int:
    """Host blocks that come back to more than one of these sequences, counted for all but one."""
    host_blocks = [block_id for sequence in sequences for block_id in sequence.host_blocks]
    return len(host_blocks) - len(set(host_blocks))
