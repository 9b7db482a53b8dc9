"""FastServe's skip-join multi-level feedback queue at Orca's iterations, over memory with swap.

A quantum doubles from level to level; a newcomer joins the highest level whose quantum covers its
prompt; who has used up its quantum goes a level down; who waits too long in a level goes to the top
one. Nobody is displaced before its first token after entering.
"""

from baselines.clockwork import Rule

QUANTUM, LEVELS, PER_TOKEN, STARVES = 1.3, 4, 0.3, 7.5  # seconds; a step takes one


class FastServe(Rule):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.level, self.joined, self.service, self.fresh = {}, {}, {}, set()

    def plan(self, waiting, running, now):
        for task in waiting:
            if task not in self.level:
                takes = task.job.prompt * PER_TOKEN
                levels = [i for i in range(LEVELS - 1) if QUANTUM * 2**i >= takes]
                self.level[task] = levels[0] if levels else LEVELS - 1
                self.joined[task], self.service[task] = task.job.arrival, 0
            if self.level[task] and now >= self.joined[task] + STARVES:
                self.level[task], self.service[task] = 0, 0
        granted, preempted = self.decodes(waiting, running, now)
        while waiting:
            task = min(waiting, key=self.rank)
            if task in preempted:  # it does not fit beside who took its place
                break
            while not (len(running) < self.sizes.rows and self.missing(task) <= self.free(running)):
                last = max(running, key=self.rank, default=task)
                if self.rank(last)[:2] <= self.rank(task)[:2]:
                    break
                granted = [pair for pair in granted if pair[0] is not last]
                self.swap_out(last, waiting, running, now)
                preempted.append(last)
            left = self.sizes.budget - sum(n for _, n in granted)
            fits = len(running) < self.sizes.rows and self.missing(task) <= self.free(running)
            if not fits or task.left > left:
                break
            task.held += self.missing(task)
            waiting.remove(task)
            running.append(task)
            self.fresh.add(task)
            granted.append((task, task.left))
        return self.serve(granted, now), preempted

    def decodes(self, waiting, running, now):
        granted, preempted = [], []
        for task in list(running):
            while task in running and self.missing(task) > self.free(running):
                preempted.append(running[-1])
                self.swap_out(running[-1], waiting, running, now)
            if task in running:
                task.held += self.missing(task)
                granted.append((task, 1))
        return granted, preempted

    def serve(self, granted, now):
        """Everybody has its first token after the step, and has used a second more."""
        for task, _ in granted:
            self.fresh.discard(task)
            self.service[task] += 1
            if (
                self.service[task] > QUANTUM * 2 ** self.level[task]
                and self.level[task] < LEVELS - 1
            ):
                self.level[task] += 1
                self.joined[task], self.service[task] = now + 1, 0
        return granted

    def rank(self, task):
        return (-1 if task in self.fresh else self.level[task], self.joined[task], task.number)

    def missing(self, task):
        return self.sizes.blocks_for(task.known) - task.held

    def swap_out(self, task, waiting, running, now):
        running.remove(task)
        waiting.append(task)
        task.held, self.joined[task] = 0, now
        self.fresh.discard(task)
