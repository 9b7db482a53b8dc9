"""`Limits`: the sizes that bound one engine, named as vLLM names them.

Owns: the numbers and the rules between them. Must not know: policies, devices.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Attributes:

    max_num_seqs: rows of the device batch.
    max_num_batched_tokens: tokens in one step.
    max_model_len: prompt plus output tokens of one request.
    block_size: KV slots per block.
    num_blocks: blocks the host hands out, the null block 0 included.
    num_host_blocks: blocks in the host's memory, to which preempted requests may be swapped out.
    preempt_every_steps: preempt one request every so many steps, memory short or not; 0 never.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    preempt_every_steps: int = 0

    def __post_init__(self) -> None:
        """Reject sizes that no engine can run with."""
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
            ("block_size", 1),
            ("num_blocks", 2),
            ("num_host_blocks", 0),
            ("preempt_every_steps", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot give each of "
                f"max_num_seqs={self.max_num_seqs} rows its one token: raise it, or lower the rows"
            )

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold KV: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_usable_slots(self) -> int:
        """Tokens that the pool can hold."""
        return self.num_usable_blocks * self.block_size

    @property
    def blocks_per_row(self) -> int:
        """Widest block table: enough for `max_model_len`."""
        return -(-self.max_model_len // self.block_size)
