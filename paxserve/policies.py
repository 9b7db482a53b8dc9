"""One choice per axis, checked against each other and against the limits.

Owns: `Policies`, and the rules about which choices and limits go together. Must not know: how a
choice was named (see `compose.py`), or what any policy does inside.
"""

import inspect
from dataclasses import dataclass

from paxserve.admission import Admission
from paxserve.batching import Batching
from paxserve.gate import Gate
from paxserve.limits import Limits
from paxserve.placement import Placement
from paxserve.preemption import Preemption
from paxserve.reservation import Reservation
from paxserve.victim import Victim


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policy of each axis, in the order of a request's life."""

    admission: Admission
    batching: Batching
    reservation: Reservation
    placement: Placement
    victim: Victim
    preemption: Preemption
    gates: tuple[Gate, ...] = ()

    def check(self, limits: Limits) -> None:
        """Refuse combinations that cannot run.

        Raises:
            ValueError: names the two sides that do not go together, with their values.
        """
        name = type(self.batching).__name__
        if self.batching.release not in ("at_finish", "with_batch"):
            raise ValueError(
                f"batching {name}: release must be at_finish or with_batch, "
                f"got {self.batching.release!r}"
            )
        if not inspect.isgeneratorfunction(self.batching.propose):
            raise ValueError(f"batching {name}: propose must be a generator, it yields proposals")
        if self.batching.whole_prompts and limits.max_num_batched_tokens < limits.max_model_len:
            raise ValueError(
                f"batching {name} does not split prompts, so max_num_batched_tokens="
                f"{limits.max_num_batched_tokens} must be at least max_model_len="
                f"{limits.max_model_len}: raise it, lower max_model_len, or choose chunked_prefill"
            )
        if not self.reservation.grows and limits.num_usable_slots < limits.max_model_len:
            raise ValueError(
                f"reservation {type(self.reservation).__name__} holds max_model_len="
                f"{limits.max_model_len} tokens per request, but the pool has "
                f"{limits.num_usable_slots} slots ({limits.num_usable_blocks} blocks of "
                f"{limits.block_size}): give it more memory or lower max_model_len"
            )
        self._check_longest_fits(limits)

    def _check_longest_fits(self, limits: Limits) -> None:
        num_blocks = limits.blocks_per_row
        empty = self.placement.open(limits.num_blocks)
        if not self.reservation.grows and empty.num_unfit(num_blocks) == empty.num_free:
            raise ValueError(
                f"reservation {type(self.reservation).__name__} may ask for {num_blocks} blocks, "
                f"max_model_len={limits.max_model_len} in blocks of {limits.block_size}, for which "
                f"placement {type(self.placement).__name__} has no place even in an empty pool of "
                f"{limits.num_usable_blocks}: give it more memory or lower max_model_len"
            )
