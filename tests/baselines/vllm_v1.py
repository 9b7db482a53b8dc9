"""vLLM V1's `Scheduler.schedule` (0.32): one token pool; nobody enters in a step that preempted."""

from baselines.block_pool import BlockPool
from baselines.clockwork import Rule


class VllmV1(Rule):
    caches = True

    def __init__(self, sizes):
        super().__init__(sizes)
        self.pool = BlockPool(sizes.blocks, sizes.block_size, caches=self.caches and sizes.caches)

    def plan(self, waiting, running, now):
        granted, preempted, budget = [], [], self.sizes.budget
        for task in list(running):
            if task not in running or not budget:
                break
            num_tokens = min(task.left, self.sizes.threshold or task.left, budget)
            while task in running and not self.pool.grow(task, task.computed + num_tokens):
                preempted.append(running[-1])
                self.pool.release(running[-1])
                self.drop(running[-1], waiting, running)
            if task in running:
                granted.append((task, num_tokens))
                budget -= num_tokens
        if not preempted:
            self.admit(waiting, running, granted, budget)
        return granted, preempted

    def admit(self, waiting, running, granted, budget):
        while waiting and budget and len(running) < self.sizes.rows:
            task = self.first(waiting)
            found = self.pool.find(task)
            left = task.known - len(found) * self.sizes.block_size
            num_tokens = min(left, self.sizes.threshold or left, budget)
            if not self.may_enter(task, found, num_tokens, running):
                break
            waiting.remove(task)
            self.pool.enter(task, found)
            assert self.pool.grow(task, task.computed + num_tokens)
            running.append(task)
            granted.append((task, num_tokens))
            budget -= num_tokens

    def first(self, waiting):
        return waiting[0]

    def may_enter(self, task, found, num_tokens, running):
        return self.pool.fits(found, task.known)  # scheduler_reserve_full_isl

    def finished(self, task):
        self.pool.release(task)
