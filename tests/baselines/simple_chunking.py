"""`simple_chunking_scheduler` of the Sarathi-Serve artifact: prompts and decodes in turn, over the
memory of `sarathi_scheduler`. A turn in which nothing can be done takes no time here.
"""

from baselines.sarathi import Sarathi


class SimpleChunking(Sarathi):
    turn_of_prompts = True

    def plan(self, waiting, running, now):
        budget, granted = self.sizes.budget, []
        if self.turn_of_prompts:
            for task in running:
                if task.computed < task.entry and budget:
                    granted.append((task, min(task.left, budget)))
                    budget -= granted[-1][1]
            granted = granted or self.newcomers(budget, waiting, running)
        if granted:
            self.turn_of_prompts = False
            return granted, []
        self.turn_of_prompts = True
        decodes = [task for task in running if task.computed >= task.entry]
        granted, preempted = self.decodes(decodes, waiting, running)
        return (granted, preempted) if granted else self.plan(waiting, running, now)
