"""vLLM V1 without prefix cache and without the gate on whole prompts, for rules that change who
goes first.
"""

from baselines.vllm_v1 import VllmV1


class VllmV1Plain(VllmV1):
    caches = False

    def may_enter(self, task, found, num_tokens, running):
        return self.pool.fits(found, num_tokens)
