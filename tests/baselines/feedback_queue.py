"""FastServe's skip-join multi-level feedback queue. A quantum doubles from level to level; a
newcomer joins the highest level whose quantum covers its prompt; who has used up its quantum goes a
level down; who waits too long in a level goes to the top one. Nobody is displaced before its first
token after entering.
"""

QUANTUM, LEVELS, PER_TOKEN, STARVES = 1.3, 4, 0.3, 7.5  # seconds; a step takes one


class FeedbackQueue:
    def __init__(self):
        self.level, self.joined, self.service, self.fresh = {}, {}, {}, set()

    def look(self, waiting, now):
        """Newcomers join, and who starves is promoted."""
        for task in waiting:
            if task not in self.level:
                takes = task.job.prompt * PER_TOKEN
                levels = [i for i in range(LEVELS - 1) if QUANTUM * 2**i >= takes]
                self.level[task] = levels[0] if levels else LEVELS - 1
                self.joined[task], self.service[task] = task.job.arrival, 0
            if self.level[task] and now >= self.joined[task] + STARVES:
                self.level[task], self.service[task] = 0, 0

    def serve(self, task, now):
        """A second of service."""
        self.fresh.discard(task)
        self.service[task] += 1
        level = self.level[task]
        if self.service[task] > QUANTUM * 2**level and level < LEVELS - 1:
            self.level[task], self.joined[task], self.service[task] = level + 1, now, 0

    def rank(self, task):
        return (-1 if task in self.fresh else self.level[task], self.joined[task])

    def place(self, task):
        return (*self.rank(task), task.number)

    def enter(self, task):
        self.fresh.add(task)

    def leave(self, task, now):
        self.fresh.discard(task)
        self.joined[task] = now
