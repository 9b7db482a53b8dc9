"""The request that has produced the least is preempted first.

Source: SGLang's retraction (`ScheduleBatch.retract_decode`): fewest output tokens, ties by the
longest prompt. SGLang leaves further ties to the sort; here the newest goes.
"""

from dataclasses import dataclass

from paxserve.request import Request


@dataclass(frozen=True, slots=True)
class FewestOutput:
    """By output tokens, fewest first, then longest prompt, then newest."""

    def key(self, request: Request) -> tuple[int, int, int]:
        """See `Victim.key`."""
        return (request.num_output_tokens, -request.num_prompt_tokens, -request.admitted_seq)
