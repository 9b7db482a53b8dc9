"""Skip-join multi-level feedback queue: who has been served little goes before who has had much.

Source: FastServe (Wu et al. 2023), section 4.1 and Algorithm 1. Differs: a quantum is a share of
the step's duration that the request took part in, since a step is shared by a batch; nothing is
swapped ahead of need; and a request is not displaced between entering and its first token after
that, because where memory is recomputed it would never come to an end.

    level   0        1        2        ...   num_levels - 1
    quantum q        2 q      4 q            no end
            <- starves          demoted ->
A request that is displaced gives up its memory with its row, even where memory is not short.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paxserve.admission import Key, Seen
from paxserve.events import Kind
from paxserve.numbers import MOST_S, real, whole
from paxserve.request import Request

MOST_LEVELS = 64


class _Job(NamedTuple):
    """Where a request stands. `joined_s`: when it joined its level, or was put back into it."""

    level: int
    joined_s: float
    served_s: float = 0.0
    waits: bool = True
    is_new: bool = True  # no token since it entered


class _Jobs(NamedTuple):
    """The state. `now_s`: of the last timer."""

    by_id: dict[str, _Job]
    now_s: float


@dataclass(frozen=True, slots=True)
class Mlfq:
    """Args:

    first_quantum_s: served time after which a request leaves level 0; doubles from level to level.
    num_levels: from the last one, nobody is demoted.
    prefill_s_per_token: predicts how long a prompt takes; a newcomer skips the levels whose quantum
        that exceeds.
    starvation_s: who has waited as long in its level moves to level 0.
    """

    first_quantum_s: float = 0.03
    num_levels: int = 6
    prefill_s_per_token: float = 0.0002
    starvation_s: float = 0.3
    displaces_running = True

    def __post_init__(self) -> None:
        """Check the fields."""
        real("first_quantum_s", self.first_quantum_s, high=MOST_S, above=True)
        whole("num_levels", self.num_levels, low=1, high=MOST_LEVELS)
        real("prefill_s_per_token", self.prefill_s_per_token, high=MOST_S)
        real("starvation_s", self.starvation_s, high=MOST_S, above=True)

    def init(self) -> _Jobs:
        """See `Learning.init`."""
        return _Jobs({}, -MOST_S)

    def observe(self, state: _Jobs, seen: Seen) -> _Jobs:
        """See `Learning.observe`."""
        request = seen.request
        if request is None:
            return state._replace(now_s=seen.time_s)
        if seen.kind is Kind.FINISHED:
            state.by_id.pop(request.request_id, None)
        elif seen.kind is Kind.ARRIVED or request.request_id in state.by_id:
            job = self._after(self._job(state, request), seen)
            state.by_id[request.request_id] = job
        return state

    def place(self, state: _Jobs, request: Request) -> tuple[Hashable, Key]:
        """See `Learning.place`: first in, first out within a level."""
        job = self._job(state, request)
        return job.level, (job.joined_s,)

    def key(self, state: _Jobs, request: Request) -> Key:
        """See `Admission.key`."""
        job = self._job(state, request)
        is_kept = job.is_new and not job.waits
        return (-1 if is_kept else job.level, job.joined_s)

    def next_timer_s(self, state: _Jobs, heads: Iterable[Request]) -> float | None:
        """See `Learning.next_timer_s`: the first head of a level that starves."""
        jobs = [self._job(state, request) for request in heads]
        return min((job.joined_s + self.starvation_s for job in jobs if job.level), default=None)

    def _job(self, state: _Jobs, request: Request) -> _Job:
        """Its job; one that starves stands in level 0, with a quantum of that level."""
        job = state.by_id.get(request.request_id)
        if job is None:
            return _Job(self._first_level(request), request.arrival_s)
        if job.waits and job.level and state.now_s >= job.joined_s + self.starvation_s:
            return job._replace(level=0, served_s=0.0)
        return job

    def _after(self, job: _Job, seen: Seen) -> _Job:
        match seen.kind:
            case Kind.ENTERED:
                return job._replace(waits=False, is_new=True)
            case Kind.PREEMPTED:
                return job._replace(waits=True, joined_s=seen.time_s)
            case Kind.SERVED:
                job = job._replace(is_new=job.is_new and not seen.num_outputs)
                served_s = job.served_s + seen.duration_s
                if served_s > self._quantum_s(job.level) and job.level < self.num_levels - 1:
                    return job._replace(level=job.level + 1, joined_s=seen.time_s, served_s=0.0)
                return job._replace(served_s=served_s)
        return job

    def _first_level(self, request: Request) -> int:
        prefill_s = request.num_prompt_tokens * self.prefill_s_per_token
        levels = range(self.num_levels - 1)
        return next((i for i in levels if self._quantum_s(i) >= prefill_s), self.num_levels - 1)

    def _quantum_s(self, level: int) -> float:
        return self.first_quantum_s * 2.0**level
