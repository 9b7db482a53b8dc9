"""Small engines without a model, and the requests they serve."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paxserve.admission.fcfs import Fcfs
from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.clock import VirtualClock
from paxserve.engine import Engine
from paxserve.events import EventLog
from paxserve.eviction.lru import Lru
from paxserve.executor import Executor
from paxserve.executor.scripted import Scripted
from paxserve.intake import Intake, Prompt
from paxserve.limits import Limits
from paxserve.placement import FreeSpace, Placement
from paxserve.placement.paged import Paged
from paxserve.policies import Policies
from paxserve.preemption.recompute import Recompute
from paxserve.prefix_cache.none import NoCache
from paxserve.request import Origin, Request
from paxserve.reservation.on_demand import OnDemand
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import Scheduler
from paxserve.step import NO_OUTPUT, RowOutput, StepPlan, StepResult
from paxserve.victim.newest import Newest

VOCAB_SIZE = 50_000


def make_limits(**sizes: int) -> Limits:
    """Four rows, and a pool of 16 usable blocks of 4 slots, unless told otherwise."""
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
        "block_size": 4,
        "num_blocks": 17,
    }
    return Limits(**(defaults | sizes))


def make_policies(**chosen: Any) -> Policies:
    """Chunked prefill over paged memory, unless told otherwise."""
    defaults = {
        "admission": Fcfs(),
        "batching": ChunkedPrefill(),
        "reservation": OnDemand(),
        "placement": Paged(),
        "prefix_cache": NoCache(),
        "eviction": Lru(),
        "victim": Newest(),
        "preemption": Recompute(),
    }
    return Policies(**(defaults | chosen))


def make_scheduler(limits: Limits | None = None, **chosen: Any) -> Scheduler:
    """A scheduler alone."""
    limits = limits or make_limits()
    return Scheduler(limits=limits, policies=make_policies(**chosen), events=EventLog())


def make_intake(limits: Limits | None = None, **options: Any) -> Intake:
    """The door of a model with `VOCAB_SIZE` tokens."""
    return Intake(**({"limits": limits or make_limits(), "vocab_size": VOCAB_SIZE} | options))


def make_request(
    num_tokens: int = 3,
    *,
    intake: Intake | None = None,
    arrival_s: float = 0.0,
    request_id: str | None = None,
    origin: Origin | None = None,
    **params: Any,
) -> Request:
    """A request with a prompt of some length; `params` are `SamplingParams`."""
    intake, sampling = intake or make_intake(), greedy(**params)
    if origin is None:
        origin = forced_origin(num_tokens, sampling, intake.limits)
    prompt: Prompt = {"prompt_token_ids": prompt_ids(num_tokens)}
    return intake.make(prompt, sampling, arrival_s=arrival_s, request_id=request_id, origin=origin)


def forced_origin(num_prompt: int, params: SamplingParams, limits: Limits) -> Origin:
    """Unless told otherwise, its true length is the most it may have: nothing else ends it."""
    longest = limits.max_model_len - num_prompt
    most = longest if params.max_tokens is None else min(longest, params.max_tokens)
    return Origin(num_true_output_tokens=most)


def greedy(**params: Any) -> SamplingParams:
    """Temperature 0 unless told otherwise."""
    return SamplingParams(**({"temperature": 0.0} | params))


def prompt_ids(num_tokens: int, salt: int = 0) -> list[int]:
    """Some prompt of this length; another salt gives another prompt."""
    return [(7919 * (i + 1) + 104_729 * salt) % VOCAB_SIZE for i in range(num_tokens)]


@dataclass
class Recording:
    """An executor that keeps the plans it was given, and checks their shape.

    `on_submit` is called with each plan before it runs.
    """

    inner: Executor
    limits: Limits
    on_submit: Callable[[StepPlan], None] = lambda plan: None
    plans: list[StepPlan] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> None:
        rows = [row.row for row in plan.rows]
        assert len(set(rows)) == len(rows) <= self.limits.max_num_seqs
        assert all(0 <= row < self.limits.max_num_seqs for row in rows)
        assert all(row.num_tokens >= 1 for row in plan.rows)
        assert all(len(row.tokens) in (0, row.num_tokens) for row in plan.rows)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert plan.rows or plan.swap_out
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows)
        self.plans.append(plan)
        self.on_submit(plan)
        self.inner.submit(plan)

    def collect(self) -> StepResult:
        return self.inner.collect()

    def reset(self) -> None:
        self.inner.reset()


@dataclass
class Dictated:
    """An executor that samples what it was told, by sequence id and output position."""

    outputs: Sequence[Sequence[int]]
    step_s: float = 1.0
    num_prompt_tokens: dict[int, int] = field(default_factory=dict)
    results: deque[StepResult] = field(default_factory=deque)

    def submit(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            self.num_prompt_tokens[entry.sequence_id] = entry.num_prompt_tokens
        outputs = []
        for row in plan.rows:
            end = row.first_position + row.num_tokens
            position = end - self.num_prompt_tokens[row.sequence_id]
            token = self.outputs[row.sequence_id][position] if row.num_samples else None
            outputs.append(NO_OUTPUT if token is None else RowOutput((token,)))
        self.results.append(StepResult(plan.step_id, tuple(outputs), self.step_s))

    def collect(self) -> StepResult:
        return self.results.popleft()

    def reset(self) -> None:
        self.results.clear()


def make_engine(
    limits: Limits | None = None,
    *,
    executor: Executor | None = None,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: Sequence[int] = (),
    tokenizer: Any = None,
    notices: Any = None,
    seed: int = 0,
    **chosen: Any,
) -> Engine:
    """An engine on a virtual clock, one second a step, whose executor is a `Recording`."""
    limits = limits or make_limits()
    policies = make_policies(**chosen)
    inner = executor or Scripted(
        limits=limits,
        vocab_size=vocab_size,
        num_host_blocks=limits.num_host_blocks,
        poison=not policies.prefix_cache.shares,  # cached blocks keep their content
    )
    return Engine(
        limits=limits,
        policies=policies,
        executor=Recording(inner, limits),
        clock=VirtualClock(),
        intake=Intake(
            limits=limits,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            seed=seed,
        ),
        tokenizer=tokenizer,
        notices=notices,
    )


def submit(
    engine: Engine, token_ids: Iterable[int], *, origin: Origin | None = None, **params: Any
) -> Request:
    """A request for these tokens; greedy unless told otherwise."""
    request_id = params.pop("request_id", None)
    arrival_s = params.pop("arrival_s", None)
    prompt, sampling = list(token_ids), greedy(**params)
    return engine.submit(
        {"prompt_token_ids": prompt},
        sampling,
        request_id=request_id,
        arrival_s=arrival_s,
        origin=origin or forced_origin(len(prompt), sampling, engine.limits),
    )


def run_to_end(engine: Engine, *, max_steps: int = 2000) -> int:
    """Step until nothing is left; returns the number of calls of `step`. Fails if it takes long."""
    for num_steps in range(max_steps):
        if not engine.has_work:
            return num_steps
        engine.step()
    raise AssertionError(f"{len(engine.scheduler.batch.requests)} requests left: no progress")


def with_room(placement: Placement, limits: Limits) -> Limits:
    """The same limits, in the smallest pool from theirs on where the longest request fits."""
    num_blocks = limits.num_blocks
    while placement.open(num_blocks).take(limits.blocks_per_row) is None:
        num_blocks += 1
    return replace(limits, num_blocks=num_blocks)


_MASK = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    mixed = (value + 1) * _MIX & _MASK
    mixed ^= mixed >> 29
    return mixed * _MIX & _MASK | 1


def tokens_alone(
    token_ids: Sequence[int], num_tokens: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """What the scripted executor must make of a prompt, written out in Python's own integers."""
    known, total = list(token_ids), _total(token_ids)
    for _ in range(num_tokens):
        known.append(_mix(total + seed & _MASK) % vocab_size)
        total += _term(len(known) - 1, known[-1])
    return known[len(token_ids) :]


def top_alone(
    token_ids: Sequence[int], num: int, *, vocab_size: int = VOCAB_SIZE
) -> list[tuple[int, float]]:
    """The best ids after a context and their log-probabilities, by the scripted executor's law."""
    digest = _mix(_total(token_ids) & _MASK)
    scale = ((digest >> 44) + 1) / 2**20
    return [((digest + i) % vocab_size, -scale * (i + 1)) for i in range(min(num, vocab_size))]


def _total(token_ids: Sequence[int]) -> int:
    return sum(_term(position, token) for position, token in enumerate(token_ids))


def _term(position: int, token: int) -> int:
    return (position + 1) * _mix(token + _mix(position) & _MASK)


class Letters:
    """A tokenizer: id i is the i-th of a few byte strings, the last one a special token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)
        self.vocab_size = len(self._pieces)
        self.special_token_ids = frozenset({self.vocab_size - 1})
        self.strips_first_space = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(f"text must be a string of valid Unicode, got {text!r}")
        return [self._pieces.index(char.encode()) for char in text]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [self._pieces[i] for i in ids if i not in self.special_token_ids]
        return b"".join(kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


@dataclass
class CheckedSpace:
    """Free space whose refusals must change nothing; `refuses(n)` can make the n-th call fail."""

    inner: FreeSpace
    refuses: Callable[[int], bool] = lambda call: False
    num_calls: int = 0
    num_refused: int = 0

    @property
    def num_free(self) -> int:
        return self.inner.num_free

    def take(self, num_blocks: int) -> list[int] | None:
        return self._ask(lambda: self.inner.take(num_blocks))

    def extend(self, block_table: Sequence[int], num_blocks: int) -> list[int] | None:
        return self._ask(lambda: self.inner.extend(block_table, num_blocks))

    def give_back(self, block_ids: Iterable[int]) -> None:
        self.inner.give_back(block_ids)

    def largest_free_run(self) -> int:
        return self.inner.largest_free_run()

    def num_unfit(self, num_blocks: int) -> int:
        return self.inner.num_unfit(num_blocks)

    def _ask(self, ask: Callable[[], list[int] | None]) -> list[int] | None:
        self.num_calls += 1
        if self.refuses(self.num_calls):
            self.num_refused += 1
            return None
        before = free_blocks(self.inner)
        found = ask()
        if found is None:
            self.num_refused += 1
            assert free_blocks(self.inner) == before, "a refusal changed the free blocks"
        return found


@dataclass(frozen=True)
class Checked:
    """A placement that opens `CheckedSpace`s."""

    inner: Placement
    refuses: Callable[[int], bool] = lambda call: False

    @property
    def contiguous(self) -> bool:
        return self.inner.contiguous

    def open(self, num_blocks: int) -> CheckedSpace:
        return CheckedSpace(self.inner.open(num_blocks), self.refuses)


def free_blocks(space: FreeSpace) -> list[int]:
    """Every free block, found by taking all of them from a copy, one by one."""
    from copy import deepcopy

    copy = deepcopy(space.inner if isinstance(space, CheckedSpace) else space)
    found: list[int] = []
    while (block_ids := copy.take(1)) is not None:
        found += block_ids
    return sorted(found)
