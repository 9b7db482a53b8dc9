"""SGLang's scheduler over a radix cache of single tokens: whole prompts first, in the order of the
longest cached prefix, as long as a share of the tokens to come stays free; when memory is short the
request with the fewest outputs is retracted.
"""

from baselines.clockwork import Rule
from baselines.longest_prefix import longest_prefix_first
from baselines.radix_pool import RadixPool

STEPS = 600  # in which the share falls to a seventh


class SglangLpm(Rule):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.pool, self.ratio = RadixPool(sizes.blocks), sizes.ratio

    def plan(self, waiting, running, now):
        entered = self.prefills(waiting, running)
        granted, preempted = (entered, []) if entered else self.decodes(waiting, running)
        start, end = self.sizes.ratio, 0.14 * self.sizes.ratio
        self.ratio = max(end, (start if preempted else self.ratio) - (start - end) / STEPS)
        return granted, preempted

    def prefills(self, waiting, running):
        granted, budget = [], self.sizes.budget
        kept = self.ratio * sum(task.job.output - task.produced for task in running)
        for task in longest_prefix_first(waiting, self.pool, self.sizes.shared):
            found = self.pool.find(task)
            left, to_come = task.known - len(found), task.job.output - task.produced
            if left > budget or len(running) == self.sizes.rows:
                break
            if (left + to_come + kept if running else left) > self.pool.num_free(found):
                break
            self.pool.enter(task, found)
            assert self.pool.grow(task, task.known)
            waiting.remove(task)
            running.append(task)
            granted.append((task, left))
            kept, budget = kept + to_come, budget - left
        return granted

    def decodes(self, waiting, running):
        granted, preempted = [], []
        for task in list(running):
            while task in running and not self.pool.grow(task, task.known):
                last = min(running, key=lambda t: (t.produced, -t.job.prompt, -running.index(t)))
                granted = [pair for pair in granted if pair[0] is not last]
                preempted.append(last)
                self.finished(last)
                self.drop(last, waiting, running)
            if task in running:
                granted.append((task, 1))
        return granted, preempted

    def served(self, task, num_outputs):
        self.pool.publish(task)

    def finished(self, task):
        self.pool.release(task)
