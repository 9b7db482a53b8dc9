"""Request-level batching (FasterTransformer, SOSP'23, section 6.1): as many of the earliest as
memory holds at maximum length, together to the end of the last.
"""

from baselines.clockwork import Rule


class Static(Rule):
    def plan(self, waiting, running, now):
        sizes = self.sizes
        most = min(sizes.rows, sizes.blocks // sizes.blocks_for(sizes.max_model_len))
        if not running:  # those that ended kept their place until now
            running += waiting[:most]
            del waiting[:most]
        prompts = [task for task in running if task.computed == 0]
        if not prompts:
            return [(task, 1) for task in running], []
        granted, budget = [], sizes.budget
        for task in prompts:
            if task.left > budget:
                break
            granted.append((task, task.left))
            budget -= task.left
        return granted, []
