"""FastServe: Orca's iterations, ranked by a feedback queue, over paged memory with swap. A request
that waits takes row and memory of the last in rank, if that ranks behind it.
"""

from baselines.clockwork import Rule
from baselines.feedback_queue import FeedbackQueue


class FastServe(Rule):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.queue = FeedbackQueue()

    def plan(self, waiting, running, now):
        self.now = now
        self.queue.look(waiting, now)
        granted, preempted = [], []
        for task in list(running):
            while task in running and self.missing(task) > self.free(running):
                self.swap_out(running[-1], waiting, running, preempted)
            if task in running:
                task.held += self.missing(task)
                granted.append((task, 1))
        while waiting:
            task = min(waiting, key=self.queue.place)
            if task in preempted:  # it does not fit beside who took its place
                break
            while not self.fits(task, running) and running:
                last = max(running, key=self.queue.place)
                if self.queue.rank(last) <= self.queue.rank(task):
                    break
                granted = [pair for pair in granted if pair[0] is not last]
                self.swap_out(last, waiting, running, preempted)
            left = self.sizes.budget - sum(num_tokens for _, num_tokens in granted)
            if not self.fits(task, running) or task.left > left:
                break
            task.held += self.missing(task)
            waiting.remove(task)
            running.append(task)
            self.queue.enter(task)
            granted.append((task, task.left))
        return granted, preempted

    def fits(self, task, running):
        has_row = len(running) < self.sizes.rows
        return has_row and self.missing(task) <= self.free(running)

    def missing(self, task):
        return self.sizes.blocks_for(task.known) - task.held

    def swap_out(self, task, waiting, running, preempted):
        running.remove(task)
        waiting.append(task)
        preempted.append(task)
        task.held = 0
        self.queue.leave(task, self.now)

    def served(self, task, num_outputs):
        self.queue.serve(task, self.now + 1)
