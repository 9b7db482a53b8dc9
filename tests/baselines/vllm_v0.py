"""vLLM V0's `_schedule_default`, one sequence per request. A block is asked for when the last one
is full (V0 itself preempts as soon as no block is free).
"""

from baselines.clockwork import Rule


class VllmV0(Rule):
    def plan(self, waiting, running, now):
        entered = self.prefills(waiting, running)
        return (entered, []) if entered else self.decodes(waiting, running)

    def prefills(self, waiting, running):
        granted, budget = [], self.sizes.budget
        watermark = int(self.sizes.watermark * self.sizes.blocks)
        while waiting:
            task = waiting[0]
            needed = self.sizes.blocks_for(task.known)
            if self.free(running) - needed < watermark:
                break
            if task.left > budget or len(running) == self.sizes.rows:
                break
            task.held = needed
            running.append(waiting.pop(0))
            granted.append((task, task.left))
            budget -= task.left
        return granted

    def decodes(self, waiting, running):
        granted, preempted, queue = [], [], list(running)
        while queue:
            task = queue.pop(0)
            needed = self.sizes.blocks_for(task.known) - task.held
            while self.free(running) < needed:
                victim = queue.pop() if queue else task
                self.drop(victim, waiting, running)
                preempted.append(victim)
                if victim is task:
                    break
            else:
                task.held += needed
                granted.append((task, 1))
        return granted, preempted
