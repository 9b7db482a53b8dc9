"""Plan, pack and apply a step of decodes, against a loop of plain Python."""

import statistics
import time

from experiments.bench.timing import Bar, report, seconds
from paxserve.compose import load_policies
from paxserve.device.buckets import Buckets
from paxserve.events import EventLog
from paxserve.executor.scripted import Scripted
from paxserve.intake import Intake
from paxserve.ledger import Ledger
from paxserve.limits import Limits
from paxserve.pack import Packer
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_HOST_ROWS, NUM_HOST_STEPS = 256, 400
BAR = Bar(300)
POLICIES = {
    "admission": "fcfs",
    "batching": "chunked_prefill",
    "reservation": "on_demand",
    "placement": "paged",
    "prefix_cache": "hash_chain",
    "eviction": "lru",
    "victim": "newest",
    "preemption": "recompute",
}


def run() -> None:
    """Prompts of different lengths, prefix cache and ledger on."""
    limits = Limits(
        max_num_seqs=NUM_HOST_ROWS,
        max_num_batched_tokens=512,
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        num_blocks=1 + NUM_HOST_ROWS * 1024 // BLOCK_SIZE,
    )
    scheduler = Scheduler(limits=limits, policies=load_policies(POLICIES), events=EventLog())
    ledger = Ledger(scheduler.batch)
    executor = Scripted(limits=limits, vocab_size=512)
    packer = Packer(
        limits=limits,
        buckets=Buckets.for_limits(limits),
        num_slots=limits.num_blocks * BLOCK_SIZE,
    )
    intake = Intake(limits=limits, vocab_size=512)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_HOST_STEPS + 100)
    for i in range(NUM_HOST_ROWS):  # blocks fill at different times, and none are alike
        prompt = [(7 * i + j) % 512 for j in range(20 + i % BLOCK_SIZE)]
        scheduler.add(intake.make({"prompt_token_ids": prompt}, params, arrival_s=0.0), now_s=0.0)
    host_s, parts_s, python_s = [], [], []
    for step in range(NUM_HOST_STEPS):
        started_s = time.perf_counter()
        scheduler.retire()
        plan = scheduler.plan(now_s=float(step))
        planned_s = time.perf_counter()
        assert plan is not None
        executor.submit(plan)
        result = executor.collect()
        executed_s = time.perf_counter()
        packer.pack(plan)
        packed_s = time.perf_counter()
        ledger.record(1.0, plan)
        recorded_s = time.perf_counter()
        scheduler.apply(plan, result, now_s=float(step))
        applied_s = time.perf_counter()
        if len(plan.rows) < NUM_HOST_ROWS:
            continue
        host_s.append(planned_s - started_s + applied_s - executed_s)
        parts_s.append(
            (
                planned_s - started_s,
                packed_s - executed_s,
                recorded_s - packed_s,
                applied_s - recorded_s,
            )
        )
        python_s.append(seconds(lambda: sum(range(NUM_HOST_ROWS)), 100) / 100)
    unit_s = statistics.median(python_s)
    name = "host: plan + pack + ledger + apply, 256 decodes, hash chain / sum(range(256))"
    report(name, host_s, python_s, BAR)
    for part, part_s in zip(
        ("plan", "pack", "ledger", "apply"), zip(*parts_s, strict=True), strict=True
    ):
        median_s = statistics.median(part_s)
        print(f"  {part}: {1e6 * median_s:.0f} us, {median_s / unit_s:.0f} x")
