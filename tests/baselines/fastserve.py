"""FastServe: Orca's iterations, ranked by a feedback queue, over paged memory with swap. A request
that waits takes row and memory of the last in rank, if these are behind it and enough.
"""

from baselines.clockwork import Rule
from baselines.feedback_queue import FeedbackQueue


class FastServe(Rule):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.queue = FeedbackQueue()

    def plan(self, waiting, running, now):
        self.now, granted, preempted = now, [], []
        self.queue.look(waiting, now)
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
            behind = [t for t in running if self.queue.rank(t) > self.queue.rank(task)]
            behind.sort(key=self.queue.place, reverse=True)
            choices = [behind[:n] for n in range(len(behind) + 1)]
            leaving = next((c for c in choices if self.fits(task, running, granted, c)), None)
            if leaving is None:
                break
            granted = [pair for pair in granted if pair[0] not in leaving]
            for last in leaving:
                self.swap_out(last, waiting, running, preempted)
            task.held += self.missing(task)
            waiting.remove(task)
            running.append(task)
            self.queue.enter(task)
            granted.append((task, task.left))
        return granted, preempted

    def fits(self, task, running, granted, leaving):
        running = [other for other in running if other not in leaving]
        used = sum(num_tokens for other, num_tokens in granted if other not in leaving)
        has_row = len(running) < self.sizes.rows and task.left <= self.sizes.budget - used
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
