"""SGLang's longest prefix match over a radix cache of single tokens: prompts first, who shares more
uncached tokens with one ahead waits for it, a share of the tokens to come stays free, and the one
with the fewest outputs is retracted.
"""

from baselines.clockwork import Rule
from baselines.radix_pool import RadixPool

STEPS = 600  # in which the ratio of the tokens to come that stays free falls to a seventh


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

    def order(self, waiting):
        cached = {task: len(self.pool.find(task)) for task in waiting}
        ahead = []
        for task in sorted(waiting, key=lambda task: (-cached[task], task.number)):
            alike = task.job.tokens[
                : min(cached[task] + self.sizes.shared + 1, task.job.prompt + 1)
            ]
            is_long = (
                len(alike) > cached[task] + self.sizes.shared and len(alike) <= task.job.prompt
            )
            if not is_long or not any(
                other.job.prompt >= len(alike) and other.job.tokens[: len(alike)] == alike
                for other in ahead
            ):
                ahead.append(task)
        return ahead

    def prefills(self, waiting, running):
        granted, budget, kept = [], self.sizes.budget, 0
        for task in running:
            kept += self.ratio * (task.job.output - task.produced)
        is_alone = not running
        for task in self.order(waiting):
            found = self.pool.find(task)
            left, to_come = task.known - len(found), task.job.output - task.produced
            free = self.pool.num_available() - self.pool.num_revived(found)
            if left > budget or len(running) == self.sizes.rows or left > free:
                break
            if not is_alone and left + to_come + kept > free:
                break
            self.pool.enter(task, found)
            assert self.pool.grow(task, task.known)
            is_alone, kept = False, kept + to_come
            waiting.remove(task)
            running.append(task)
            granted.append((task, left))
            budget -= left
        return granted

    def decodes(self, waiting, running):
        granted, preempted = [], []
        for task in list(running):
            while task in running and not self.pool.grow(task, task.known):
                last = min(running, key=lambda t: (t.produced, -t.job.prompt, -running.index(t)))
                granted = [pair for pair in granted if pair[0] is not last]
                preempted.append(last)
                self.pool.release(last)
                self.drop(last, waiting, running)
            if task in running:
                granted.append((task, 1))
        return granted, preempted

    def served(self, task, num_outputs):
        self.pool.publish(task)

    def finished(self, task):
        self.pool.release(task)
