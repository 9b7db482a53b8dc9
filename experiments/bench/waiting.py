"""A scheduler's step before a crowd: what 100,000 waiting requests cost."""

import time

from experiments.bench.host import BLOCK_SIZE, POLICIES
from experiments.bench.timing import Bar, report
from paxserve.compose import load_policies
from paxserve.events import EventLog
from paxserve.executor.scripted import Scripted
from paxserve.intake import Intake
from paxserve.limits import Limits
from paxserve.request import Origin
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import Scheduler

NUM_FEW, NUM_MANY = 100, 100_000
BAR = Bar(1.3)


def run() -> None:
    """Three orders of admission."""
    for admission in ("fcfs", "sjf", "vtc"):
        compare(admission)


def compare(admission: str) -> None:
    """A step with 100,000 requests waiting, against one with 100: 64 rows, 16 of them change hands
    in every step, and as many requests arrive.
    """
    few, many = _Crowd(admission, NUM_FEW), _Crowd(admission, NUM_MANY)
    for _ in range(10):
        few.step(), many.step()
    pairs = [(many.step(), few.step()) for _ in range(200)]
    name = f"waiting: {admission}, step with {NUM_MANY} waiting / with {NUM_FEW}"
    report(name, *zip(*pairs, strict=True), BAR)


class _Crowd:
    """A scheduler before which a number of requests keeps waiting."""

    def __init__(self, admission: str, num_waiting: int) -> None:
        limits = Limits(
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=64,
            block_size=BLOCK_SIZE,
            num_blocks=1 + 64 * 4,
        )
        policies = load_policies(POLICIES | {"admission": admission})
        self._scheduler = Scheduler(limits=limits, policies=policies, events=EventLog())
        self._executor = Scripted(limits=limits, vocab_size=512)
        self._intake = Intake(limits=limits, vocab_size=512)
        self._params = SamplingParams(temperature=0.0, max_tokens=4)
        self._num_added = 0
        self._add(num_waiting)

    def _add(self, number: int) -> None:
        for _ in range(number):
            i = self._num_added = self._num_added + 1
            request = self._intake.make(
                {"prompt_token_ids": [i % 512] * (5 + i % 7)},
                self._params,
                arrival_s=float(i),
                origin=Origin(client=str(i % 50), num_true_output_tokens=1 + i % 101),
            )
            self._scheduler.add(request, now_s=0.0)

    def step(self) -> float:
        """Seconds of retiring, planning and applying; then newcomers replace those who left."""
        scheduler = self._scheduler
        started_s = time.perf_counter()
        scheduler.retire()
        plan = scheduler.plan(now_s=0.0)
        planned_s = time.perf_counter()
        assert plan is not None
        self._executor.submit(plan)
        result = self._executor.collect()
        executed_s = time.perf_counter()
        scheduler.apply(plan, result, now_s=0.0)
        applied_s = time.perf_counter()
        self._add(len(scheduler.take_ended()))
        return planned_s - started_s + applied_s - executed_s
