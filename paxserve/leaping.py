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

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from operator import contains
from typing import NamedTuple

import numpy as np

from paxserve.batch import Batch
from paxserve.clock import Clock
from paxserve.decoding import grow_each
from paxserve.executor import Repeating, Repeats
from paxserve.ledger import Ledger, SlotCounts
from paxserve.notices import Notices
from paxserve.planning import HeldBack, log_held_back
from paxserve.records import StepLog
from paxserve.request import Request
from paxserve.scheduler import Repeatable, Scheduler
from paxserve.step import Rows, StepPlan

MOST_STEPS = 256  # of one leap: its columns are held in memory


class _Group:
    """The requests that decode, in the order of their rows, as they stood before the leap."""

    def __init__(self, batch: Batch, sequence_ids: SequenceOf[int]) -> None:
        pairs = [batch.by_sequence[sequence_id] for sequence_id in sequence_ids]
        self.requests = [request for request, _ in pairs]
        self.sequences = [sequence for _, sequence in pairs]
        self.computed = [sequence.num_computed_tokens for sequence in self.sequences]
        self.known = [len(sequence.token_ids) for sequence in self.sequences]

    def may_stop(self, tokens: SequenceOf[int]) -> bool:
        """Whether one of these tokens might end its request."""
        return any(map(contains, [request.stop_ids for request in self.requests], tokens))

    def num_steps_left(self) -> int:
        """Steps in which nobody ends: the last token of a request is its end."""
        pairs = zip(self.requests, self.known, strict=True)
        return min(request.max_known_tokens - known for request, known in pairs) - 1

    def advance(self, num_steps: int, places: Iterable[int] | None = None) -> None:
        """So many tokens have been computed since; of some, or of all."""
        for place in range(len(self.sequences)) if places is None else places:
            self.sequences[place].num_computed_tokens = self.computed[place] + num_steps


class _Course(NamedTuple):
    """What will happen in `num_steps` steps: places in the rows by the number of the step in which
    their table is full before it, or their last block is full after it.
    """

    num_steps: int
    grows: Mapping[int, SequenceOf[int]]
    fills: Mapping[int, SequenceOf[int]]


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
        self._batch = scheduler.batch
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
        if found is None or repeats is None or self._clock.now_s() >= until_s:
            return []
        group = _Group(self._batch, found.plan.columns.sequence_ids)
        course = self._course(group, repeats)
        if course.num_steps < 1:
            return []
        log = self._run(found, group, repeats, course, until_s)
        self._record(found, log, notices)
        return group.requests

    def _course(self, group: _Group, repeats: Repeats) -> _Course:
        """How far it is sure, from where the requests are now."""
        if group.may_stop(repeats.tokens):
            return _Course(0, {}, {})
        block_size = self._batch.limits.block_size
        num_steps = min(MOST_STEPS, group.num_steps_left())
        computed = np.array(group.computed)
        held = np.array([len(sequence.block_table) for sequence in group.sequences]) * block_size
        grows = _every(held - computed, block_size, num_steps)
        is_contiguous = self._batch.policies.placement.contiguous
        most = 0 if is_contiguous else self._batch.pool.num_available
        num_steps = _first_unaffordable(grows, most, num_steps)
        fills = _every((-1 - computed) % block_size, block_size, num_steps)
        return _Course(num_steps, grows, fills if self._publishes else {})

    def _run(
        self, found: Repeatable, group: _Group, repeats: Repeats, course: _Course, until_s: float
    ) -> _Log:
        """Everything but the records."""
        clock, pool, events = self._clock, self._batch.pool, self._scheduler.events
        log = _Log([], [], [], [], [], [], [])
        for sequence, token in zip(group.sequences, repeats.tokens, strict=True):
            sequence.token_ids.extend([token] * course.num_steps)
        for step in range(course.num_steps):
            start_s, num_evicted = clock.now_s(), pool.num_evicted
            if start_s >= until_s:
                break
            events.begin_step(start_s)
            self._plan(found.held_back, group, course, step)
            if self._ledger.notes_promises:
                group.advance(step + 1)
                self._ledger.note_promises(step=step)
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
                self._publish(group, course.fills.get(step, ()))
        events.now_s = log.times_s[-1]
        group.advance(len(log.times_s))
        for sequence, known in zip(group.sequences, group.known, strict=True):
            del sequence.token_ids[known + len(log.times_s) :]
            sequence.token_times_s.extend(log.times_s)
            sequence.num_sent_blocks = len(sequence.block_table)
        return log

    def _plan(self, held_back: HeldBack | None, group: _Group, course: _Course, step: int) -> None:
        """What planning a step would do, and say, in the same order."""
        events = self._scheduler.events
        if held_back is not None and held_back.is_first:
            log_held_back(events, held_back)
        full = course.grows.get(step, ())
        if full:
            group.advance(step, full)
            grow_each(self._batch, events, [group.requests[place] for place in full])
        filled = course.fills.get(step, ())
        group.advance(step + 1, filled)
        if self._publishes == "planning":
            self._publish(group, filled)
        if held_back is not None and not held_back.is_first:
            log_held_back(events, held_back)

    def _publish(self, group: _Group, places: Iterable[int]) -> None:
        for place in places:
            self._batch.publish(group.requests[place], group.sequences[place])

    def _record(self, found: Repeatable, log: _Log, notices: Notices | None) -> None:
        rows, last, num_steps = found.plan.columns, self._steps[-1], len(log.times_s)
        block_size = self._batch.limits.block_size
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


def _every(first: np.ndarray, period: int, num_steps: int) -> dict[int, list[int]]:
    """Places by step: each in its own `first` step, and in every `period`-th after it."""
    found: dict[int, list[int]] = {}
    for place in (first < num_steps).nonzero()[0].tolist():
        for step in range(int(first[place]), num_steps, period):
            found.setdefault(step, []).append(place)
    return found


def _first_unaffordable(grows: dict[int, list[int]], num_blocks: int, num_steps: int) -> int:
    """The first step in which more than `num_blocks` will have been taken, or `num_steps`."""
    for step in sorted(grows):
        num_blocks -= len(grows[step])
        if num_blocks < 0:
            return step
    return num_steps
