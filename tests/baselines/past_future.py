"""Past-Future (ASPLOS'25, section 3) in vLLM V1's steps: with whoever enters, the peak of future
memory fits the pool, if everybody goes on as long as some of those that finished did.
"""

from baselines.vllm_v1_plain import VllmV1Plain


class PastFuture(VllmV1Plain):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.past = []

    def may_enter(self, task, found, num_tokens, running):
        if running and self.peak([*running, task]) > self.sizes.blocks * self.sizes.block_size:
            return False
        return super().may_enter(task, found, num_tokens, running)

    def peak(self, tasks):
        """With known tokens k and remaining tokens r, most remaining first: when the i-th ends, it
        and those before it hold their k and its r each.
        """
        futures = sorted(((self.remaining(task), task.known) for task in tasks), reverse=True)
        return max(
            sum(known for _, known in futures[: i + 1]) + (i + 1) * remaining
            for i, (remaining, _) in enumerate(futures)
        )

    def remaining(self, task):
        longer = sorted(length for length in self.past if length > task.produced)
        if not longer:  # nobody went on so long: to its own limit, which is its true length here
            return task.job.output - task.produced
        return min(longer[int(task.job.chance * len(longer))], task.job.output) - task.produced

    def finished(self, task):
        super().finished(task)
        self.past.append(task.job.output)
