"""Random small workloads, served by the composed policies of a baseline, and how they were."""

from dataclasses import dataclass
from random import Random
from typing import Any

from baselines.buddy_space import power_of_two
from baselines.clockwork import Job, Sizes, Step
from baselines.composed import baseline_policies, choices
from builders import make_engine, make_limits, make_policies, submit, tokens_alone

from paxserve.events import Kind
from paxserve.prediction import draw
from paxserve.request import Origin


@dataclass(frozen=True)
class Case:
    """A workload and the limits that it runs in."""

    sizes: Sizes
    jobs: list[Job]


def random_case(name: str, seed: int, *, block_size: int | None, shares: bool) -> Case:
    """A workload for a baseline, in which every request alone fits budget and pool.

    Args:
        name: of the baseline.
        seed: of the case.
        block_size: if the baseline is to run with one.
        shares: prompts begin alike, in whole blocks of a small alphabet.
    """
    random, policies = Random(seed), baseline_policies(name)
    size = block_size or random.choice([1, 2, 3, 4])
    jobs = []
    for _ in range(random.randint(2, 7)):
        prompt, output = random.choice([1, *range(1, 15)]), random.randint(1, 9)
        blocks = [random.choice([0, 0, 0, 1]) for _ in range(-(-prompt // size))]
        ids = [100 * b + i for b in blocks for i in range(size)] if shares else []
        ids = ids[:prompt] or [random.randrange(50_000) for _ in range(prompt)]
        jobs.append(
            Job(
                arrival=random.choice([0, 0, 0, 1, 2, 5, 9]),
                prompt=prompt,
                output=output,
                tokens=(*ids, *tokens_alone(ids, output)),
                client=random.choice("abc"),
            )
        )
    jobs.sort(key=lambda job: job.arrival)
    jobs = [job._replace(chance=draw(str(number))) for number, job in enumerate(jobs)]
    max_model_len = max(job.prompt + job.output for job in jobs)
    rows = random.randint(1, 5)
    least = max(rows, max_model_len if policies["batching"].whole_prompts else 1)
    watermark = random.choice([0.0, 0.0, 0.1, 0.2])
    longest = -(-max_model_len // size)
    if choices(name)["placement"] == "buddy":
        longest = power_of_two(longest)
    blocks = random.randint(longest, 2 * longest)
    while blocks - int(watermark * blocks) < longest:
        blocks += 1
    sizes = Sizes(
        rows=rows,
        budget=random.randint(least, least + 16),
        blocks=blocks,
        block_size=size,
        max_model_len=max_model_len,
        watermark=watermark,
        threshold=random.choice([0, 0, 3]),
        shared=random.choice([0, 2]),
        ratio=random.choice([0.0, 0.4, 0.7]),
    )
    return Case(sizes, jobs)


def served(case: Case, name: str, settings: dict[str, dict[str, Any]]) -> list[Step]:
    """What the engine does, step by step."""
    sizes, policies = case.sizes, make_policies(**baseline_policies(name, settings))
    limits = make_limits(
        max_num_seqs=sizes.rows,
        max_num_batched_tokens=sizes.budget,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        num_blocks=1 + sizes.blocks,
        num_host_blocks=sizes.blocks * len(case.jobs) if policies.preemption.swaps else 0,
    )
    engine = make_engine(limits, **baseline_policies(name, settings))
    coming = list(enumerate(case.jobs))
    while coming or engine.has_work:
        while coming and coming[0][1].arrival <= engine.clock.now_s():
            number, job = coming.pop(0)
            submit_job(engine, number, job)
        if not engine.has_work:
            engine.clock.wait_until(coming[0][1].arrival)
            continue
        engine.step()
    preempted: dict[int, list[int]] = {}
    for event in engine.events:
        if event.kind is Kind.PREEMPTED:
            preempted.setdefault(event.step_id, []).append(int(event.request_id))
    steps = [
        Step(
            [(row.sequence_id, row.num_tokens) for row in plan.rows],
            preempted.pop(plan.step_id, []),
        )
        for plan in engine.executor.plans
    ]
    assert not preempted, "preempted in steps that computed nothing"
    return steps


def submit_job(engine: Any, number: int, job: Job) -> None:
    """The job as a request whose output length is forced."""
    request = submit(
        engine,
        job.tokens[: job.prompt],
        max_tokens=job.output,
        request_id=str(number),
        arrival_s=float(job.arrival),
        origin=Origin(
            client=job.client,
            num_true_output_tokens=job.output,
            num_declared_output_tokens=job.output,
        ),
    )
    assert request.sequence.sequence_id == number
