"""Shortest job first, by the true output length, in vLLM V1's steps."""

from baselines.vllm_v1_plain import VllmV1Plain


class Sjf(VllmV1Plain):
    def first(self, waiting):
        return min(waiting, key=lambda task: (task.job.output, task.number))
