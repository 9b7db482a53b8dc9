"""The slot ledger against a count block by block, at every step of runs that share and swap."""

import pytest
from builders import make_engine, make_limits, prompt_ids, submit
from hypothesis import event, given, settings
from hypothesis import strategies as st

from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.ledger import SlotCounts
from paxserve.placement.buddy import Buddy
from paxserve.placement.paged import Paged
from paxserve.preemption.recompute import Recompute
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.none import NoCache
from paxserve.prefix_cache.radix import Radix
from paxserve.reservation.max import Max
from paxserve.reservation.on_demand import OnDemand
from paxserve.reservation.pow2 import Pow2

EOS, VOCAB_SIZE, STEP_S = 3, 12, 0.5


def slots_of(batch, requests):
    """Per block of these requests: slots with KV and slots promised, the most of any table."""
    block_size = batch.limits.block_size
    found = {}
    for request in requests:
        for sequence in request.live:
            computed = 0 if sequence.source is not None else sequence.num_computed_tokens
            for i in range(len(sequence.block_table) * block_size):
                filled, promised = found.setdefault(sequence.block_table[i // block_size], (0, 0))
                offset = i % block_size + 1
                filled = max(filled, offset * (i < computed))
                promised = max(promised, offset * (i < max(computed, sequence.num_reserved_tokens)))
                found[sequence.block_table[i // block_size]] = filled, promised
    return found


def expected_counts(batch, unfit):
    block_size, pool = batch.limits.block_size, batch.pool
    running = slots_of(batch, batch.running)
    dead = [s for r in batch.finished for s in r.live] + batch.dead
    held = {b for s in dead for b in s.block_table} - set(running)
    live = sum(filled for filled, _ in running.values())
    promised = sum(promised for _, promised in running.values())
    num_rounding = sum(promised == 0 for _, promised in running.values())
    return SlotCounts(
        live=live,
        reserved_used=promised - live,
        tail=sum(block_size - promised for _, promised in running.values() if promised),
        rounding=num_rounding * block_size,
        held=len(held) * block_size,
        cached=len(pool.cached) * block_size,
        free_unfit=unfit,
        free=pool.num_free * block_size - unfit,
        null=block_size,
    )


class Watched:
    """Stands before an engine's ledger and counts for itself."""

    def __init__(self, engine):
        self.ledger, self.batch = engine.ledger, engine.scheduler.batch
        self.record_inside, self.ledger.record = self.ledger.record, self.record
        self.slot_s = {}
        self.num_quick = 0

    def record(self, duration_s):
        batch, block_size = self.batch, self.batch.limits.block_size
        counts = self.record_inside(duration_s)
        assert counts == expected_counts(batch, counts.free_unfit)
        assert counts.free_unfit == 0 or batch.policies.placement.contiguous
        extra = sum(len(s.block_table) for r in batch.requests.values() for s in r.sequences)
        tables = {b for r in batch.requests.values() for s in r.sequences for b in s.block_table}
        assert self.ledger.num_shared_owners[-1] == (extra - len(tables)) * block_size
        if not self.ledger._has_forks():
            self.num_quick += 1
            assert self.ledger._quickly() == self.ledger._exactly(batch.running)
        for request in batch.running:
            own = slots_of(batch, [request])
            sums = self.slot_s.setdefault(request, [0.0, 0.0, 0.0])
            sums[0] += sum(filled for filled, _ in own.values()) * duration_s
            sums[1] += sum(promised for _, promised in own.values()) * duration_s
            sums[2] += len(own) * block_size * duration_s
        return counts

    def check_slot_seconds(self, requests):
        self.ledger.settle()
        for request in requests:
            got = [request.live_slot_s, request.promised_slot_s, request.held_slot_s]
            assert got == pytest.approx(self.slot_s.get(request, [0.0, 0.0, 0.0]))
            assert got == sorted(got)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 9),  # prompt tokens
        st.integers(1, 7),  # max_tokens
        st.sampled_from([(1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (0, 2)]),  # n, beam width
        st.integers(0, 1),  # salt of the prompt
    ),
    min_size=1,
    max_size=6,
)
MEMORY = st.sampled_from(
    [
        *[(OnDemand(), Paged(), cache) for cache in (NoCache(), HashChain(), Radix())],
        (OnDemand(), Buddy(), NoCache()),
        (Max(), Paged(), NoCache()),
        (Pow2(), Buddy(), NoCache()),
    ]
)


@given(
    requests=REQUESTS,
    memory=MEMORY,
    num_blocks=st.integers(16, 40),
    block_size=st.integers(1, 4),
    preemption=st.sampled_from([Recompute(), Swap()]),
    batching=st.sampled_from([ChunkedPrefill(), Textbook(), Static(), Static()]),
    forced=st.sampled_from([0, 2, 3]),
)
@settings(max_examples=150)
def test_the_ledger_counts_every_slot_once_and_every_request_its_own(
    requests, memory, num_blocks, block_size, preemption, batching, forced
):
    reservation, placement, cache = memory
    limits = make_limits(
        num_blocks=max(num_blocks, 34 if not reservation.grows else 0),
        block_size=block_size,
        max_model_len=16,
        max_num_batched_tokens=16,
        num_host_blocks=6,
        preempt_every_steps=forced,
    )
    engine = make_engine(
        limits,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        reservation=reservation,
        placement=placement,
        prefix_cache=cache,
        preemption=preemption,
        batching=batching,
    )
    watched = Watched(engine)
    for number, (length, max_tokens, (n, width), salt) in enumerate(requests):
        params = {"max_tokens": max_tokens}
        if width and engine.scheduler.policies.shares:
            params |= {"beam_width": width}
        elif n > 1:
            params |= {"n": n, "temperature": 1.0, "seed": number}
        submit(engine, [t % VOCAB_SIZE for t in prompt_ids(length, salt)], **params)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
        assert num_steps < 1000, "no progress"
    watched.check_slot_seconds(engine.requests)
    steps = engine.ledger.steps()
    assert len(steps) == len(engine.steps)
    assert all(sum(step) == limits.num_blocks * block_size for step in steps)
    assert all(min(step) >= 0 for step in steps)
    event(f"counted quickly: {watched.num_quick > 0}, with forks: {watched.num_quick < len(steps)}")
