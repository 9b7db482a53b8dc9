"""vLLM V1's block pool (0.32): a free block keeps its content and can be found until it is taken.
Those without content are taken first, then the longest unused. V1 keeps every block of one content
findable; here it is one, and when that is taken, the next table with this content that goes on.
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
        ends = range(self.block_size, num_tokens + 1, self.block_size)
        prefixes = [task.job.tokens[:end] for end in ends if self.caches]
        start = task.indexed
        while start < len(prefixes) and start and prefixes[start - 1] not in self.block_of:
            start -= 1
        for prefix, block in list(zip(prefixes, task.table, strict=False))[start:]:
            if self.block_of.setdefault(prefix, block) == block:
                self.prefix_of[block] = prefix
        task.indexed = max(start, len(prefixes))

    def release(self, task):
        for block in reversed(task.table):  # its end is to be taken first
            self.users[block] -= 1
            if not self.users[block]:
                (self.lru if block in self.prefix_of else self.unused).append(block)
        task.table = []
