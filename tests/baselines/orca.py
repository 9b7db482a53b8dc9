"""Orca (OSDI'22, Algorithm 1) over a buddy allocator, with the three reservations of SOSP'23, 6.1.
A token budget, which Orca does not have, stops newcomers too.
"""

from baselines.buddy_space import BuddySpace, power_of_two
from baselines.clockwork import Rule


class Orca(Rule):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.space = BuddySpace(sizes.blocks)
        self.areas = {}

    def reserved(self, job):
        raise NotImplementedError

    def plan(self, waiting, running, now):
        granted = [(task, 1) for task in running]
        budget = self.sizes.budget - len(granted)
        while waiting and len(running) < self.sizes.rows and waiting[0].left <= budget:
            task = waiting[0]
            area = self.space.take(self.sizes.blocks_for(self.reserved(task.job)))
            if area is None:
                break
            self.areas[task] = area
            running.append(waiting.pop(0))
            granted.append((task, task.left))
            budget -= task.left
        return granted, []

    def finished(self, task):
        self.space.give_back(self.areas.pop(task))


class OrcaMax(Orca):
    def reserved(self, job):
        return self.sizes.max_model_len


class OrcaPow2(Orca):
    def reserved(self, job):
        return min(job.prompt + power_of_two(job.output), self.sizes.max_model_len)


class OrcaOracle(Orca):
    def reserved(self, job):
        return job.prompt + job.output - 1  # the last token is never written
