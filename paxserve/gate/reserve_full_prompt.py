"""Admit only whom the free blocks hold with all its known tokens, however small its first chunk.

Source: vLLM V1's scheduler (`scheduler_reserve_full_isl`): a prompt admitted chunk by chunk can
run out of memory half-way. Differs: nothing is set aside, it is a condition at admission; and a
request that stands alone enters.
"""

from dataclasses import dataclass

from paxserve.gate import MemoryView
from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class ReserveFullPrompt:
    """Prompt, and output where it resumes."""

    def refusal(self, state: None, request: Request, memory: MemoryView) -> str | None:
        """See `Gate.refusal`."""
        num_needed = max(memory.num_needed, memory.num_needed_for_all)
        if not memory.running or num_needed <= memory.num_free:
            return None
        return (
            f"reserve_full_prompt: its known tokens take {num_needed} blocks, "
            f"{memory.num_free} are free"
        )
