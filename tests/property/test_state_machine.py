"""Requests come, run, fork, share, are preempted, swapped, aborted and finished in any order: the
invariants hold after each, and every token is the one that the request gets alone.
"""

from collections import Counter
from functools import cache

import pytest
from axes import policies
from builders import (
    Checked,
    make_engine,
    make_limits,
    prompt_ids,
    run_to_end,
    submit,
    tokens_alone,
)
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from invariants import check, check_idle

from paxserve.events import Kind
from paxserve.intake import InvalidRequest, seed_of_sample
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.none import NoCache
from paxserve.request import FinishReason, State

VOCAB_SIZE = 40
EOS = 7
COVERED: Counter[str] = Counter()
WANTED = (
    "abort while waiting",
    "abort while running",
    "abort in the middle of a prompt",
    "abort while preempted",
    "abort while swapped out",
    "preempted while prefilling",
    "preempted with shared blocks",
    "preempted by a shortage",
    "refused by the placement",
    "last block exactly full",
    "outgrew the pool",
    "evicted a cached block",
    "hit an evictable block",
    "hit a block that decodes filled",
    "hit all of a prompt but its last block",
    "forked a partly filled block",
    "swapped out",
    "swapped in",
    "swap refused by a full host pool",
    "group resumed after recompute",
    "group resumed after swap",
    "one sample ended before another",
)


class EngineMachine(RuleBasedStateMachine):
    """Beside the engine it keeps only what was asked for and what was ended from outside."""

    @initialize(data=st.data())
    def open(self, data):
        block_size = data.draw(st.sampled_from([1, 2, 4]))
        num_usable = data.draw(st.sampled_from([3, 4, 5, 6, 7, 8, 8, 9, 9]))
        chosen = self.choose(data)
        batching, reservation = chosen["batching"], chosen["reservation"]
        self.room = block_size * longest_table(chosen["placement"].inner, num_usable + 1)
        beyond = block_size + 2 if reservation.grows else 0
        max_model_len = max(2, self.room + data.draw(st.integers(-3, beyond)))
        max_model_len = min(max_model_len, self.room + beyond)
        rows = data.draw(st.sampled_from([1, 2, 3, 4, 4, 4]))
        least = max(rows, max_model_len if batching.whole_prompts else 1)
        self.limits = make_limits(
            block_size=block_size,
            num_blocks=num_usable + 1,
            max_num_seqs=rows,
            max_model_len=max_model_len,
            max_num_batched_tokens=max(least, data.draw(st.sampled_from([rows, rows + 1, 12]))),
            num_host_blocks=data.draw(st.integers(1, 6)) if chosen["preemption"].swaps else 0,
            preempt_every_steps=data.draw(st.sampled_from([0, 0, 0, 2, 3])),
        )
        self.engine = make_engine(self.limits, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], **chosen)
        self.ended_by_hand = {}
        self.num_events = 0
        self.methods = {}

    def choose(self, data):
        """One policy per axis; most runs share prefixes, which needs blocks anywhere."""
        draw = data.draw
        shares = draw(st.sampled_from([True, True, False]))
        placements = [p for p in policies("placement") if not (shares and p.contiguous)]
        caches = [c for c in policies("prefix_cache") if c.shares]
        batchings = policies("batching")
        splitting = [batching for batching in batchings if not batching.whole_prompts]
        growing = [r for r in policies("reservation") if r.grows]
        chosen = {axis: draw(st.sampled_from(policies(axis))) for axis in ("eviction", "victim")}
        return chosen | {
            "preemption": draw(st.sampled_from([Swap(), *policies("preemption")])),
            "batching": draw(st.sampled_from([*batchings, *splitting])),
            "reservation": draw(
                st.sampled_from(growing if shares else [*policies("reservation"), *growing])
            ),
            "placement": Checked(draw(st.sampled_from(placements))),
            "prefix_cache": draw(st.sampled_from(caches)) if shares else NoCache(),
        }

    @property
    def batch(self):
        return self.engine.scheduler.batch

    def live(self, *states):
        return [r for r in self.engine.requests if r.state in states]

    def pick(self, data, requests):
        return data.draw(st.sampled_from(sorted(requests, key=lambda r: r.arrival_seq)))

    def submit(self, token_ids, **params):
        """A request, or a refusal at the door where that is due."""
        num_sequences = params.get("beam_width") or params.get("n", 1)
        if params.get("n", 1) > 1:
            params |= {"temperature": 1.0, "seed": len(self.engine.requests)}
        is_wrong = (
            not 0
            < len(token_ids)
            <= min(self.limits.num_usable_slots, self.limits.max_model_len - 1)
            or num_sequences > self.limits.max_num_seqs
            or ("beam_width" in params and not self.engine.scheduler.policies.shares)
        )
        if is_wrong:
            with pytest.raises(InvalidRequest):
                submit(self.engine, token_ids, **params)
        else:
            submit(self.engine, token_ids, **params)

    def prompt(self, multiple):
        block_size, slots = self.limits.block_size, self.limits.num_usable_slots
        length = {
            "none": 0,
            "one": 1,
            "short": block_size - 1,
            "block": block_size,
            "over": block_size + 1,
            "two": 2 * block_size,
            "pool": slots,
            "pool + 1": slots + 1,
        }[multiple]
        salt = len(self.engine.requests) % 2
        return [token % VOCAB_SIZE for token in prompt_ids(length, salt)]

    @rule(
        multiple=st.sampled_from(
            ["none", "one", "short", "block", "over", "two", "pool", "pool + 1"]
        ),
        max_tokens=st.one_of(st.none(), st.integers(1, 9)),
    )
    def add(self, multiple, max_tokens):
        self.submit(self.prompt(multiple), max_tokens=max_tokens)

    @rule(
        multiple=st.sampled_from(["one", "short", "block", "over", "two"]),
        max_tokens=st.integers(1, 7),
        shape=st.sampled_from([{"n": 2}, {"n": 3}, {"beam_width": 2}, {"beam_width": 3}]),
    )
    def add_a_group(self, multiple, max_tokens, shape):
        self.submit(self.prompt(multiple), max_tokens=max_tokens, **shape)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), num_dropped=st.integers(0, 2), max_tokens=st.integers(1, 5))
    def add_what_follows_another(self, data, num_dropped, max_tokens):
        """A prompt that begins as an earlier one with its output, such as a second turn."""
        earlier = self.pick(data, self.engine.requests)
        known = earlier.sequence.token_ids
        longest = min(self.limits.num_usable_slots, self.limits.max_model_len - 1)
        self.submit(known[: max(1, min(longest, len(known) - num_dropped))], max_tokens=max_tokens)

    @rule(max_tokens=st.integers(1, 9))
    def begin_the_longest_prompt(self, max_tokens):
        """With a budget shorter than it, the step leaves it in the middle."""
        length = min(self.limits.num_usable_slots, self.limits.max_model_len - 1)
        self.submit([t % VOCAB_SIZE for t in prompt_ids(length, salt=3)], max_tokens=max_tokens)
        self.step(1)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            before = Before(self.engine)
            self.engine.step()
            check(self.engine)
            self.cover(before)

    @precondition(lambda self: self.live(State.WAITING))
    @rule(data=st.data())
    def abort_waiting(self, data):
        waiting = self.live(State.WAITING)
        swapped_out = [r for r in waiting if r.sequence.host_blocks]
        self.abort(self.pick(data, swapped_out or waiting))

    @precondition(lambda self: self.live(State.RUNNING))
    @rule(data=st.data())
    def abort_running(self, data):
        self.abort(self.pick(data, self.live(State.RUNNING)))

    def abort(self, request):
        COVERED[f"abort while {request.state}"] += 1
        if request.state is State.RUNNING and not request.num_output_tokens:
            COVERED["abort in the middle of a prompt"] += 1
        if request.state is State.WAITING and request.num_preemptions:
            COVERED["abort while preempted"] += 1
            COVERED["abort while swapped out"] += bool(request.sequence.host_blocks)
        assert self.engine.abort(request.request_id)
        self.ended_by_hand[request] = FinishReason.ABORT

    @rule(data=st.data())
    def abort_what_is_unknown_or_over(self, data):
        over = [r.request_id for r in self.live(State.FINISHED)]
        in_use = [r.request_id for r in self.live(State.WAITING, State.RUNNING)]
        request_id = data.draw(st.sampled_from(["never seen", *over]))
        if request_id not in in_use:
            num_events = len(self.engine.events)
            assert not self.engine.abort(request_id)
            assert len(self.engine.events) == num_events

    @precondition(lambda self: self.live(State.RUNNING))
    @rule(data=st.data())
    def finish(self, data):
        request = self.pick(data, self.live(State.RUNNING))
        now_s = self.engine.clock.now_s()
        self.engine.scheduler.finish(request, FinishReason.STOP, now_s=now_s, stop_reason="x")
        self.ended_by_hand[request] = FinishReason.STOP

    @precondition(lambda self: self.live(State.RUNNING))
    @rule(data=st.data(), count=st.integers(1, 3), steps=st.booleans())
    def preempt(self, data, count, steps):
        for _ in range(count):
            self.engine.scheduler.preempt(self.pick(data, self.live(State.RUNNING)))
        if steps:
            self.step(1)

    def cover(self, before):
        """What happened in a step, from its events and its plan."""
        pool, requests = self.batch.pool, {r.request_id: r for r in self.engine.requests}
        events = list(self.engine.events)
        for happened in events[self.num_events :]:
            if happened.kind is Kind.REJECTED:
                continue
            request = requests[happened.request_id]
            is_group = len(request.sequences) > 1
            if happened.kind is Kind.PREEMPTED:
                method = "swap" if happened.detail.startswith("swap") else "recompute"
                self.methods[request] = method
                COVERED["preempted by a shortage"] += happened.detail in ("swap", "recompute")
                COVERED["preempted while prefilling"] += request in before.prefilling
                COVERED["preempted with shared blocks"] += request in before.sharing
                COVERED["swap refused by a full host pool"] += "swap needs" in happened.detail
            if happened.kind is Kind.ENTERED:
                if is_group and request in self.methods:
                    COVERED[f"group resumed after {self.methods.pop(request)}"] += 1
                self.cover_hits(request, before)
        self.num_events = len(events)
        COVERED["evicted a cached block"] += pool.num_evicted - before.num_evicted
        for plan in self.engine.executor.plans[before.num_plans :]:
            COVERED["forked a partly filled block"] += len(plan.copies)
            COVERED["swapped out"] += len(plan.swap_out)
            COVERED["swapped in"] += len(plan.swap_in)

    def cover_hits(self, request, before):
        num_hit, table = request.num_cached_tokens, request.sequence.block_table
        found = table[: num_hit // self.limits.block_size]
        COVERED["hit an evictable block"] += bool(before.cached & set(found))
        COVERED["hit a block that decodes filled"] += bool(before.by_decodes & set(found))
        all_blocks = num_hit + self.limits.block_size == request.num_prompt_tokens
        is_first = request.num_preemptions == 0
        COVERED["hit all of a prompt but its last block"] += (
            is_first and all_blocks and request in before.found_whole
        )

    @invariant()
    def all_invariants_hold(self):
        if not hasattr(self, "engine"):
            return
        check(self.engine)
        block_size = self.limits.block_size
        for request in self.batch.running:
            sequence = request.sequence
            if sequence.num_computed_tokens == len(sequence.block_table) * block_size > 0:
                COVERED["last block exactly full"] += 1
        COVERED["one sample ended before another"] += bool(self.batch.dead)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        live = self.live(State.WAITING, State.RUNNING)
        bound = 10 + sum((4 * self.limits.max_model_len + 8) * len(r.sequences) for r in live)
        run_to_end(self.engine, max_steps=bound)
        check_idle(self.engine)
        for request in self.engine.requests:
            self.check_outcome(request)
        count_events(self.engine)

    def check_outcome(self, request):
        got = [tuple(request.output_of(sequence)) for sequence in request.sequences]
        expected = expected_outputs(request)
        for sequence, output in zip(request.sequences, got, strict=True):
            assert len(output) == len(sequence.token_times_s)
            assert sequence.token_times_s == sorted(sequence.token_times_s)
        if request in self.ended_by_hand:
            assert request.finish_reason is self.ended_by_hand[request]
            assert request.beams or are_prefixes(got, expected)
        elif request.finish_reason is FinishReason.ERROR:
            self.check_too_large(request, got, expected)
        else:
            is_stop = expected[0][-1] == EOS
            assert request.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            assert got == expected

    def check_too_large(self, request, got, expected):
        """It ended in an error: it needed more than the pool, and came as far as that goes."""
        COVERED["outgrew the pool"] += 1
        num_prompt = request.num_prompt_tokens
        assert request.beams or are_prefixes(got, expected)
        longest = (
            request.max_known_tokens - 1
            if request.beams
            else num_prompt + max(map(len, expected)) - 1
        )
        if len(request.sequences) == 1:
            assert longest > self.room
            assert len(got[0]) == max(0, self.room - num_prompt + 1)
        else:
            policies = self.engine.scheduler.policies
            per_sequence = -(-longest // self.limits.block_size) + 1
            if not policies.reservation.grows:
                per_sequence = self.limits.blocks_per_row
            needed = len(request.sequences) * per_sequence
            if not policies.placement.contiguous:
                assert needed > self.limits.num_usable_blocks or longest > self.room
        # Preempted with more known tokens than there is room for, it cannot resume; nor enter,
        # where the room is smaller than the pool.
        may_be_stuck = request.num_preemptions or num_prompt > self.room or len(got) > 1
        stuck = may_be_stuck and "cannot be scheduled" in request.error
        assert stuck or "outgrew the KV pool" in request.error


class Before:
    """What a step must be compared with to tell what it did."""

    def __init__(self, engine):
        batch = engine.scheduler.batch
        pool, block_size = batch.pool, engine.limits.block_size
        self.cached = set(pool.cached)
        self.num_evicted = pool.num_evicted
        self.num_plans = len(engine.executor.plans)
        self.prefilling = {r for r in batch.running if not r.is_decode}
        self.sharing = {
            request
            for request in batch.running
            if any(pool.ref_count(b) > 1 for s in request.live for b in s.block_table)
        }
        self.by_decodes = set()
        self.found_whole = set()
        for request in batch.waiting:
            token_ids = request.prompt_token_ids
            num_blocks = len(token_ids) // block_size
            if len(pool.index.match(token_ids, salt="", num_blocks=num_blocks)) == num_blocks:
                self.found_whole.add(request)
        for request in engine.requests:
            known = request.sequence.token_ids
            found = pool.index.match(known, salt="", num_blocks=len(known) // block_size)
            self.by_decodes |= set(found[request.num_prompt_tokens // block_size :])


def are_prefixes(got, expected):
    return all(e[: len(g)] == g for g, e in zip(got, expected, strict=True))


def expected_outputs(request):
    """What each sequence must bring, whatever happens around it."""
    num_tokens = request.max_known_tokens - request.num_prompt_tokens
    if request.beams is not None:
        return beams_alone(request.prompt_token_ids, num_tokens, request.params.beam_width)
    outputs = []
    for i in range(len(request.sequences)):
        seed = seed_of_sample(request.params.seed, i) if request.params.seed is not None else 0
        tokens = tokens_alone(
            request.prompt_token_ids, num_tokens, seed=seed, vocab_size=VOCAB_SIZE
        )
        end = tokens.index(EOS) + 1 if EOS in tokens else num_tokens
        outputs.append(tuple(tokens[:end]))
    return outputs


@cache
def beams_alone(token_ids, num_tokens, width):
    """The outputs of a beam search with plenty of everything; `test_forking` checks those."""
    limits = make_limits(num_blocks=400, max_model_len=len(token_ids) + num_tokens)
    engine = make_engine(limits, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    request = submit(engine, token_ids, beam_width=width, max_tokens=num_tokens)
    run_to_end(engine)
    return [tuple(request.output_of(sequence)) for sequence in request.sequences]


def longest_table(placement, num_blocks):
    """Blocks of the longest table that an empty pool has a place for."""
    lengths = range(1, num_blocks)
    return max(n for n in lengths if placement.open(num_blocks).take(n) is not None)


def count_events(engine):
    events = list(engine.events)
    finished = [e.request_id for e in events if e.kind is Kind.FINISHED]
    assert sorted(finished) == sorted(r.request_id for r in engine.requests)
    num_preempted = sum(e.kind is Kind.PREEMPTED for e in events)
    assert num_preempted == sum(r.num_preemptions for r in engine.requests)
    entered = {(e.step_id, e.request_id) for e in events if e.kind is Kind.ENTERED}
    num_entered = Counter(request_id for _, request_id in entered)
    for request in engine.requests:
        assert num_entered[request.request_id] in (
            request.num_preemptions,
            request.num_preemptions + 1,
        )
    event(f"preemptions: {min(num_preempted, 3)}")
    space = engine.scheduler.batch.pool.free_space
    COVERED["refused by the placement"] += space.num_refused


def test_engine_under_any_sequence_of_events():
    COVERED.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=400,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what in WANTED:
        assert COVERED[what] >= 3, f"the machine hardly ever does this: {what}, {COVERED}"
