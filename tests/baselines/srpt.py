"""Shortest remaining processing time, by output tokens to come, in vLLM V1's steps: who waits takes
the row and the memory of the one that has most left, if that is more than its own.
"""

from baselines.vllm_v1_plain import VllmV1Plain


def rank(task):
    return (task.job.output - task.produced, task.job.arrival, task.number)


class Srpt(VllmV1Plain):
    def plan(self, waiting, running, now):
        self.displaced = []
        granted, preempted = super().plan(waiting, running, now)
        return granted, preempted + self.displaced

    def admit(self, waiting, running, granted, budget):
        while waiting and budget:
            task = min(waiting, key=rank)
            if task in self.displaced:  # it does not fit beside who took its place
                break
            num_tokens = min(task.left, self.sizes.threshold or task.left, budget)
            while len(running) == self.sizes.rows or not self.pool.fits([], num_tokens):
                last = max(running, key=rank)
                if rank(last)[:2] <= rank(task)[:2]:
                    return
                for pair in [pair for pair in granted if pair[0] is last]:
                    granted.remove(pair)
                    budget += pair[1]
                self.pool.release(last)
                self.drop(last, waiting, running)
                self.displaced.append(last)
            waiting.remove(task)
            assert self.pool.grow(task, num_tokens)
            running.append(task)
            granted.append((task, num_tokens))
            budget -= num_tokens
