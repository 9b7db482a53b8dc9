"""Runs of decode steps in one move.

Owns: how far the last step can be repeated, and everything that repeating it does: blocks for
tables that become full, blocks that become known to the prefix cache, tokens and their times, the
records. In: a scheduler whose last step is `repeatable`, an executor that can tell how it goes on.
Out: the same state and the same records as without, step by step. Must not know: policies; they
declare what makes a step repeatable.

    step   0      1      2      3     ...     k     k + 1
           |      |<---------- one leap ----->|      |
        planned,  nobody ends, arrives, lacks a     planned: somebody ends, arrives,
        repeatable     block or is preempted        or may lack a block
"""

from collections.abc import Iterable
from operator import contains
from typing import NamedTuple

import numpy as np

from paxserve.clock import Clock
from paxserve.decoding import grow_each
from paxserve.executor import Repeating, Repeats
from paxserve.ledger import Ledger, SlotCounts
from paxserve.notices import Notices
from paxserve.planning import log_held_back
from paxserve.records import StepLog
from paxserve.request import Request, Sequence
from paxserve.scheduler import Repeatable, Scheduler
from paxserve.step import Rows, StepPlan

MOST_STEPS = 256  # of one leap: its columns are held in memory


class _Course(NamedTuple):
    """What will happen in `num_steps` steps: places in the rows by the number of the step in which
    their table is full before it, or their last block is full after it.
    """

    num_steps: int
    grows: dict[int, list[int]]
    fills: dict[int, list[int]]


class _Log(NamedTuple):
    """A value per step."""

    start_s: list[float]
    durations_s: list[float]
    times_s: list[float]
    terms_s: list[tuple[float, ...]]
    num_evicted: list[int]
    pools: list[tuple[int, int, int]]
    num_used_blocks: list[int]


class Leaping:
    """`num_steps` were leapt so far."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Repeating,
        ledger: Ledger,
        steps: StepLog,
        clock: Clock,
    ) -> None:
        self.num_steps = 0
        self._scheduler = scheduler
        self._executor = executor
        self._ledger = ledger
        self._steps = steps
        self._clock = clock
        cache = scheduler.policies.prefix_cache
        self._publishes = cache.publish if cache.shares else None

    def leap(self, until_s: float, notices: Notices | None) -> list[Request]:
        """Repeat the last step as often as is sure, and only in steps that begin before `until_s`.

        Args:
            until_s: when somebody may come from outside.
            notices: told of the steps afterwards.

        Returns:
            The requests that got tokens; none if nothing was sure.
        """
        found = self._scheduler.repeatable
        repeats = None if found is None else self._executor.repeats(found.plan.columns)
        if found is None or repeats is None:
            return []
        by_sequence = self._scheduler.batch.by_sequence
        pairs = [by_sequence[number] for number in found.plan.columns.sequence_ids]
        requests, sequences = [r for r, _ in pairs], [s for _, s in pairs]
        course = self._course(requests, sequences, repeats)
        if course.num_steps < 1:
            return []
        log = self._run(found, requests, sequences, repeats, course, until_s)
        self._record(found, log, notices)
        return requests

    def _course(
        self, requests: list[Request], sequences: list[Sequence], repeats: Repeats
    ) -> _Course:
        """How far it is sure, from where the requests are now."""
        batch, policies = self._scheduler.batch, self._scheduler.policies
        block_size = batch.limits.block_size
        stops = [request.stop_ids for request in requests]
        if any(map(contains, stops, repeats.tokens)):
            return _Course(0, {}, {})
        left = [
            request.max_known_tokens - len(sequence.token_ids)
            for request, sequence in zip(requests, sequences, strict=True)
        ]
        num_steps = min(MOST_STEPS, min(left) - 1)  # with its last token a request ends
        computed = np.array([sequence.num_computed_tokens for sequence in sequences])
        held = np.array([len(sequence.block_table) for sequence in sequences]) * block_size
        grows = _every(held - computed, block_size, num_steps)
        most = 0 if policies.placement.contiguous else batch.pool.num_available
        num_steps = min(num_steps, _last_affordable(grows, most, num_steps))
        fills = _every((-1 - computed) % block_size, block_size, num_steps)
        return _Course(num_steps, grows, fills if self._publishes else {})

    def _run(
        self,
        found: Repeatable,
        requests: list[Request],
        sequences: list[Sequence],
        repeats: Repeats,
        course: _Course,
        until_s: float,
    ) -> _Log:
        """Everything but the records."""
        scheduler, clock, ledger = self._scheduler, self._clock, self._ledger
        batch, events, pool = scheduler.batch, scheduler.events, scheduler.batch.pool
        log = _Log([], [], [], [], [], [], [])
        positions = [sequence.num_computed_tokens for sequence in sequences]
        num_known = [len(sequence.token_ids) for sequence in sequences]
        for sequence, token in zip(sequences, repeats.tokens, strict=True):
            sequence.token_ids.extend([token] * course.num_steps)
        held_back, notes = found.held_back, ledger.notes_promises
        for step in range(course.num_steps):
            start_s = clock.now_s()
            if start_s >= until_s:
                break
            events.begin_step(start_s)
            num_evicted = pool.num_evicted
            if held_back is not None and held_back.is_first:
                log_held_back(events, held_back)
            if step in course.grows:
                self._advance(sequences, positions, course.grows[step], step)
                grow_each(batch, events, [requests[place] for place in course.grows[step]])
            filled = course.fills.get(step, ())
            self._advance(sequences, positions, filled, step + 1)
            if self._publishes == "planning":
                for place in filled:
                    batch.publish(requests[place], sequences[place])
            if held_back is not None and not held_back.is_first:
                log_held_back(events, held_back)
            if notes:
                self._advance(sequences, positions, range(len(sequences)), step + 1)
                ledger.note_promises(step=step)
            terms_s = repeats.terms_s(step + 1)
            duration_s = sum(terms_s)
            clock.spend(duration_s)
            log.start_s.append(start_s)
            log.durations_s.append(duration_s)
            log.times_s.append(clock.now_s())
            log.terms_s.append(terms_s)
            log.num_evicted.append(pool.num_evicted - num_evicted)
            log.pools.append((pool.num_cached, pool.num_free, pool.num_extra_refs))
            log.num_used_blocks.append(pool.num_held)
            if self._publishes == "after_step":
                for place in filled:
                    batch.publish(requests[place], sequences[place])
        num_steps = len(log.times_s)
        events.now_s = log.times_s[-1]
        self._advance(sequences, positions, range(len(sequences)), num_steps)
        for sequence, known in zip(sequences, num_known, strict=True):
            del sequence.token_ids[known + num_steps :]
            sequence.token_times_s.extend(log.times_s)
            sequence.num_sent_blocks = len(sequence.block_table)
        return log

    def _record(self, found: Repeatable, log: _Log, notices: Notices | None) -> None:
        rows, last, num_steps = found.plan.columns, self._steps[-1], len(log.times_s)
        block_size = self._scheduler.batch.limits.block_size
        further = np.arange(1, num_steps + 1)
        counts = self._ledger.record_run(log.durations_s, log.pools)
        ends = rows.firsts + 1 + further[:, None]
        columns = {
            "step_id": last.step_id + further,
            "start_s": log.start_s,
            "duration_s": log.durations_s,
            "terms_s": log.terms_s,
            "num_blocks": (-(-ends // block_size)).sum(axis=1),
            "num_evicted": log.num_evicted,
            "num_used_blocks": log.num_used_blocks,
            "num_shared_owners": self._ledger.num_shared_owners[-num_steps:],
        }
        self._steps.extend_run(last, {name: np.array(values) for name, values in columns.items()})
        self.num_steps += num_steps
        positions = [first + num_steps for first in rows.first_positions]
        plan = StepPlan(
            step_id=last.step_id + num_steps,
            rows=Rows.decodes(rows.sequence_ids, rows.places, positions),
        )
        self._scheduler.repeated(found, plan)
        if notices is not None:
            num_told = num_steps if notices.watches(last) else 1
            told = zip(self._steps[-num_told:], counts[-num_told:].tolist(), strict=True)
            for record, classes in told:
                notices.after_step(record, SlotCounts._make(classes), self._scheduler.events)

    @staticmethod
    def _advance(
        sequences: list[Sequence], positions: list[int], places: Iterable[int], num_steps: int
    ) -> None:
        """These sequences have computed so many tokens more than at the start."""
        for place in places:
            sequences[place].num_computed_tokens = positions[place] + num_steps


def _every(first: np.ndarray, period: int, num_steps: int) -> dict[int, list[int]]:
    """Places by step: each in its own `first` step, and in every `period`-th after it."""
    found: dict[int, list[int]] = {}
    for place in (first < num_steps).nonzero()[0].tolist():
        for step in range(int(first[place]), num_steps, period):
            found.setdefault(step, []).append(place)
    return found


def _last_affordable(grows: dict[int, list[int]], num_blocks: int, num_steps: int) -> int:
    """The first step in which more than `num_blocks` will have been taken, or `num_steps`."""
    for step in sorted(grows):
        num_blocks -= len(grows[step])
        if num_blocks < 0:
            return step
    return num_steps
