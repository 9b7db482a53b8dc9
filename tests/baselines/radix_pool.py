"""A pool of single tokens under a radix tree: what was computed can be found after the step, and of
those that nobody holds the leaf that was let go of longest ago is taken.
"""

from baselines.block_pool import BlockPool


class RadixPool(BlockPool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks, 1, caches=True)

    def num_free(self, found):
        """Tokens that there is room for beside those found."""
        num_revived = sum(self.users[block] == 0 for block in found)
        return len(self.unused) + len(self.lru) - num_revived

    def oldest(self):
        prefixes = [prefix[:-1] for prefix in self.block_of]
        return next(block for block in self.lru if self.prefix_of[block] not in prefixes)

    def index(self, task, num_tokens):
        """Not yet: after the step."""

    def publish(self, task):
        """What is computed, as long as the tree runs through the task's own blocks."""
        while task.indexed < task.computed:
            block, prefix = task.table[task.indexed], task.job.tokens[: task.indexed + 1]
            if self.block_of.setdefault(prefix, block) != block:
                break
            self.prefix_of[block] = prefix
            task.indexed += 1
