"""The frame in which the naive transcriptions run: arrivals, time, and tokens being produced.

Nothing of paxserve is used here or by them: plain lists and counters. A transcription is a `Rule`
whose `plan` answers, as the published scheduler would, who computes how many tokens in this step,
in the order of asking, and who is preempted; it moves tasks between the lists of those that wait
and run. Tasks that end leave the list of those that run by themselves.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class Job(NamedTuple):
    """A request to come. `tokens`: prompt and output, where a rule looks at content. `chance`: a
    number from 0 to 1, where a rule draws lots.
    """

    arrival: int
    prompt: int
    output: int
    tokens: tuple[int, ...] = ()
    client: str = ""
    chance: float = 0.0


class Sizes(NamedTuple):
    """The limits, and the knobs that a published scheduler has."""

    rows: int
    budget: int
    blocks: int
    block_size: int
    max_model_len: int
    watermark: float = 0.0
    threshold: int = 0  # of a long prompt
    shared: int = 0  # tokens that make a request wait for another
    ratio: float = 0.0  # of the tokens to come that stays free
    caches: bool = True

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(eq=False)
class Task:
    """A job under way: `known` tokens, of which some are `computed`, and `held` blocks. `entry`
    tokens were known when it last began.
    """

    number: int
    job: Job
    known: int
    computed: int = 0
    held: int = 0
    entry: int = 0
    indexed: int = 0  # blocks of the table that were offered to a prefix cache
    table: list[int] = field(default_factory=list)  # block ids, for rules that look at them

    @property
    def left(self) -> int:
        return self.known - self.computed

    @property
    def produced(self) -> int:
        return self.known - self.job.prompt

    @property
    def is_done(self) -> bool:
        return self.known == self.job.prompt + self.job.output


class Step(NamedTuple):
    """Who computed how many tokens, in the order of asking, and who was preempted."""

    computed: list[tuple[int, int]]
    preempted: list[int]


type Granted = list[tuple[Task, int]]


class Rule:
    """A published scheduler."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def plan(
        self, waiting: list[Task], running: list[Task], now: int
    ) -> tuple[Granted, list[Task]]:
        """One step; `waiting` is by arrival, those preempted in front."""
        raise NotImplementedError

    def served(self, task: Task, num_outputs: int) -> None:
        """A step that computed for the task has run."""

    def finished(self, task: Task) -> None:
        """The task has ended; it runs no more."""

    def free(self, running: list[Task]) -> int:
        """Blocks that nobody holds, for rules that only count them."""
        return self.sizes.blocks - sum(task.held for task in running)

    def drop(self, task: Task, waiting: list[Task], running: list[Task]) -> None:
        """Preempt: to the front of the queue, with nothing computed."""
        running.remove(task)
        waiting.insert(0, task)
        task.computed = task.held = 0


def schedule(jobs: list[Job], rule: Rule) -> list[Step]:
    """Run jobs, sorted by arrival, to the end; a step takes one unit of time."""
    coming = [Task(number, job, job.prompt) for number, job in enumerate(jobs)]
    waiting: list[Task] = []
    running: list[Task] = []
    steps: list[Step] = []
    now = 0
    while coming or waiting or running:
        while coming and coming[0].job.arrival <= now:
            waiting.append(coming.pop(0))
        if not waiting and not running:
            now = coming[0].job.arrival
            continue
        granted, preempted = rule.plan(waiting, running, now)
        assert granted, "the rule computes nothing"
        steps.append(Step([(t.number, n) for t, n in granted], [t.number for t in preempted]))
        now += 1
        for task, num_tokens in granted:
            task.computed += num_tokens
            num_outputs = int(task.left == 0)
            task.known += num_outputs
            rule.served(task, num_outputs)
            if task.is_done:
                running.remove(task)
                rule.finished(task)
    return steps
