"""How a waiting request gets rows and memory: what it finds cached, what the gates say, what it
shares, what comes back from the host.

Owns: the order of these questions. In: a waiting request. Out: it has entered, or a reason why not
and nothing changed. Must not know: whom to preempt for it, batching policies.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
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


class Demand(NamedTuple):
    """What a request would take: `claims` are what its sequences may compute in this step, `held`
    what they need memory for. `hits` were found cached. New blocks: for this step, and for all
    known tokens.
    """

    claims: list[Claim]
    held: list[Claim]
    hits: list[int]
    num_blocks: int
    num_blocks_for_all: int


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
        demand = self._demand(request, num_tokens, num_budget, hits, computes=computes)
        refusal = demand if isinstance(demand, Refusal) else self._refusal(request, demand)
        if isinstance(demand, Refusal) or refusal is not None or not self._hold(request, demand):
            self._close(request)
            return refusal or Refusal(Reason.BLOCKS)
        if not computes:
            self._batch.tables.promises_ahead = True
        self._batch.enter(request)
        return demand.claims

    def would_enter(
        self, request: Request, num_tokens: int, *, num_budget: int, without: list[Request]
    ) -> bool:
        """Whether a waiting request would enter if these running ones made way; nothing changes.

        Where tables are contiguous it is not known whether what becomes free lies side by side.
        """
        num_rows = len(self._batch.free_rows) + sum([len(r.live) for r in without])
        if request in self._draft.dropped or len(request.live) > num_rows:
            return False
        rows = [self._draft.rows.get(s.sequence_id) for r in without for s in r.live]
        num_budget += sum([row.num_tokens for row in rows if row is not None])
        demand = self._demand(request, num_tokens, num_budget, self._open(request), computes=True)
        may = not isinstance(demand, Refusal) and (
            self._refusal(request, demand, without=without) is None
        )
        self._close(request)
        return may

    def _open(self, request: Request) -> list[int]:
        """Count as computed what the cache has and what the sequences share; returns the blocks
        that were found.
        """
        trunk = request.live[0]
        if trunk.host_blocks:
            return []
        block_size, hits = self._batch.limits.block_size, self._batch.hits(request)
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

    def _demand(
        self,
        request: Request,
        num_tokens: int,
        num_budget: int,
        hits: list[int],
        *,
        computes: bool,
    ) -> Demand | Refusal:
        """What the request would take."""
        tables, limits = self._batch.tables, self._batch.limits
        num_tokens = num_grantable(
            request,
            num_tokens,
            num_budget=num_budget,
            largest_step=limits.max_num_batched_tokens,
        )
        if not num_tokens:
            return Refusal(Reason.BUDGET)
        claims = spread(request, num_tokens)
        if not computes:
            claims = [claim for claim in claims if claim.sequence.source is None]
        restored = [s for s in request.live if s.host_blocks]
        claimed = {claim.sequence for claim in claims}
        held = claims + [Claim(s, 0) for s in restored if s not in claimed]
        if self._batch.policies.placement.contiguous:  # a run begun for a chunk may never grow
            held = [Claim(s, s.num_remaining_tokens) for s in request.live]
        everything = spread(request, request.num_remaining_tokens)
        num_shared = len(hits) + _num_blocks_twice(restored)
        return Demand(
            claims=claims,
            held=held,
            hits=hits,
            num_blocks=tables.num_missing_blocks(request, held) - num_shared,
            num_blocks_for_all=tables.num_missing_blocks(request, everything) - num_shared,
        )

    def _refusal(
        self, request: Request, demand: Demand, *, without: SequenceOf[Request] = ()
    ) -> Refusal | None:
        """What speaks against the demand: a gate, or too few blocks."""
        pool, limits = self._batch.pool, self._batch.limits
        num_free = pool.num_available - pool.num_unheld(demand.hits)
        if without:  # what only they hold becomes free, but for what would be a hit
            num_free += len(self._batch.tables.held_only_by(without).difference(demand.hits))
        if self._batch.gates:
            memory = MemoryView(
                num_usable=limits.num_usable_blocks,
                num_free=num_free,
                num_needed=demand.num_blocks,
                num_needed_for_all=demand.num_blocks_for_all,
                num_cached_tokens=len(demand.hits) * limits.block_size,
                block_size=limits.block_size,
                running=_all_but(without, self._batch.running),
                newcomers=frozenset(_all_but(without, self._draft.newcomers)),
            )
            if (why := self._batch.gates.refusal(request, memory)) is not None:
                return Refusal(Reason.GATE, why)
        return Refusal(Reason.BLOCKS) if demand.num_blocks > num_free else None

    def _hold(self, request: Request, demand: Demand) -> bool:
        """Blocks for every claim, shared ones first, and what must be swapped in; or False and
        nothing is held.
        """
        tables, pool, hits = self._batch.tables, self._batch.pool, demand.hits
        num_evicted = pool.num_evicted
        if hits:
            tables.share(request.live[0], hits, is_hit=True)
            request.live[0].num_published_blocks = len(hits)
        device_of: dict[int, int] = {}
        swap_in: list[BlockCopy] = []
        by_place = {s: place for place, s in enumerate(request.live)}
        for claim in sorted(demand.held, key=lambda claim: by_place[claim.sequence]):
            sequence = claim.sequence
            if sequence.host_blocks:
                known = [device_of[b] for b in sequence.host_blocks if b in device_of]
                tables.share(sequence, known, is_hit=False)
            if not tables.hold(request, [claim]):
                for held in reversed(request.live):
                    tables.let_go(held)
                return False
            for host_id, block_id in zip(sequence.host_blocks, sequence.block_table, strict=False):
                if host_id not in device_of:
                    device_of[host_id] = block_id
                    swap_in.append(BlockCopy(host_id, block_id))
            self._draft.touched[sequence.sequence_id] = sequence
        if pool.num_evicted > num_evicted:
            num_slots = (pool.num_evicted - num_evicted) * self._batch.limits.block_size
            self._events.add(Kind.EVICTED, request.request_id, num_tokens=num_slots)
        self._draft.newcomers[request] = swap_in
        self._note_hits(request, hits)
        return True

    def _note_hits(self, request: Request, hits: list[int]) -> None:
        request.num_cached_tokens = len(hits) * self._batch.limits.block_size
        if not hits or not self._draft.published:
            return
        published = {b for blocks in self._draft.published.values() for b in blocks}
        for block_id in published.intersection(hits):
            self._draft.hits.setdefault(block_id, []).append(request)


def _num_blocks_twice(sequences: list[Sequence]) -> int:
    """Host blocks that come back to more than one of these sequences, counted for all but one."""
    host_blocks = [block_id for sequence in sequences for block_id in sequence.host_blocks]
    return len(host_blocks) - len(set(host_blocks))


def _all_but(some: SequenceOf[Request], requests: Iterable[Request]) -> tuple[Request, ...]:
    return tuple([r for r in requests if r not in some] if some else requests)
