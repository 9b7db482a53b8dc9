"""vLLM V1's block pool (0.32): a free block keeps its content and can be found until it is taken.
Those without content are taken first, then the longest unused. Of two blocks with one content only
the first can be found (V1 keeps both).
"""


class BlockPool:
    def __init__(self, num_blocks, block_size, *, caches):
        self.block_size, self.caches = block_size, caches
        self.unused, self.lru = list(range(num_blocks)), []  # free: not to be found, to be found
        self.block_of, self.prefix_of, self.users = {}, {}, [0] * num_blocks

    def find(self, task):
        """Blocks for the longest known prefix; the last token is always computed."""
        found = []
        while self.caches and (len(found) + 1) * self.block_size < task.known:
            block = self.block_of.get(task.job.tokens[: (len(found) + 1) * self.block_size])
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, found, num_tokens):
        """Whether there is room for so many, of which some are found; those may be free blocks."""
        revived = sum(self.users[block] == 0 for block in found)
        missing = -(-num_tokens // self.block_size) - len(found)
        return missing + revived <= len(self.unused) + len(self.lru)

    def enter(self, task, found):
        for block in found:
            self.users[block] += 1
        self.lru = [block for block in self.lru if not self.users[block]]
        task.table, task.indexed = found, len(found)
        task.computed = len(found) * self.block_size

    def grow(self, task, num_tokens):
        """Blocks for so many tokens, which can then be found; False if there are too few."""
        if not self.fits(task.table, num_tokens):
            return False
        while len(task.table) * self.block_size < num_tokens:
            block = self.unused.pop() if self.unused else self.oldest()
            self.lru = [other for other in self.lru if other != block]
            self.block_of.pop(self.prefix_of.pop(block, None), None)
            self.users[block] = 1
            task.table.append(block)
        self.index(task, num_tokens)
        return True

    def oldest(self):
        return self.lru[0]

    def index(self, task, num_tokens):
        num_full = num_tokens // self.block_size if self.caches else 0
        for i in range(task.indexed, num_full):
            prefix = task.job.tokens[: (i + 1) * self.block_size]
            if self.block_of.setdefault(prefix, task.table[i]) == task.table[i]:
                self.prefix_of[task.table[i]] = prefix
        task.indexed = max(task.indexed, num_full)

    def release(self, task):
        for block in reversed(task.table):  # its end is to be taken first
            self.users[block] -= 1
            if not self.users[block]:
                (self.lru if block in self.prefix_of else self.unused).append(block)
        task.table = []
