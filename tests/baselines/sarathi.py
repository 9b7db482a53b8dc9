"""`sarathi_scheduler` of the Sarathi-Serve artifact. A block is asked for when the last one is full
(the artifact preempts as soon as no block is free).
"""

from baselines.clockwork import Rule


class Sarathi(Rule):
    def plan(self, waiting, running, now):
        decodes = [task for task in running if task.computed >= task.entry]
        prompts = [task for task in running if task.computed < task.entry]
        granted, preempted = self.decodes(decodes, waiting, running)
        budget = self.sizes.budget - len(granted)
        for task in prompts:
            if task in running and budget:
                granted.append((task, min(task.left, budget)))
                budget -= granted[-1][1]
        return granted + self.newcomers(budget, waiting, running), preempted

    def decodes(self, decodes, waiting, running):
        granted, preempted = [], []
        for task in decodes:
            if task not in running:
                continue
            needed = self.sizes.blocks_for(task.known) - task.held
            while task in running and self.free(running) < needed:
                preempted.append(running[-1])
                self.drop(running[-1], waiting, running)
            if task in running:
                task.held += needed
                granted.append((task, 1))
        return granted, preempted

    def newcomers(self, budget, waiting, running):
        granted = []
        watermark = int(self.sizes.watermark * self.sizes.blocks)
        while waiting:
            task = waiting[0]
            needed = self.sizes.blocks_for(task.known)  # of the whole prompt
            if self.free(running) - needed < watermark or len(running) == self.sizes.rows:
                break
            if not budget:
                break
            task.held, task.entry = needed, task.known
            running.append(waiting.pop(0))
            granted.append((task, min(task.left, budget)))
            budget -= granted[-1][1]
        return granted
