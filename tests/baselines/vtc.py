"""Virtual token counters (OSDI'24, Algorithm 2) in vLLM V1's steps: 1 for each token of a prompt
that enters, 2 for each of the output. Preemption is not in the paper: it gives nothing back.
"""

from baselines.vllm_v1_plain import VllmV1Plain


class Vtc(VllmV1Plain):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.counter, self.backlogged, self.last_left, self.charged = {}, set(), None, set()

    def plan(self, waiting, running, now):
        self.note(waiting)
        result = super().plan(waiting, running, now)
        self.note(waiting)
        return result

    def served(self, task, num_outputs):
        self.counter[task.job.client] += 2 * num_outputs

    def note(self, waiting):
        """Who comes to have requests waiting is lifted; who has none any more is remembered."""
        clients = [task.job.client for task in waiting]
        for client in sorted(self.backlogged - set(clients)):
            self.backlogged.remove(client)
            self.last_left = client
        for client in clients:
            if client not in self.backlogged:
                others = [self.counter[other] for other in self.backlogged]
                floor = min(others) if others else self.counter.get(self.last_left, 0)
                self.counter[client] = max(self.counter.get(client, 0), floor)
                self.backlogged.add(client)

    def first(self, waiting):
        self.note(waiting)
        task = min(waiting, key=lambda t: (self.counter[t.job.client], t.job.arrival, t.number))
        return task

    def may_enter(self, task, found, num_tokens, running):
        enters = super().may_enter(task, found, num_tokens, running)
        if enters and task not in self.charged:
            self.charged.add(task)
            self.counter[task.job.client] += task.job.prompt
        return enters
