"""One choice per axis, checked against each other and against the limits.

Owns: `Policies`, and the rules about which choices and limits go together. Must not know: how a
choice was named (see `compose.py`), or what any policy does inside.
"""

import inspect
from dataclasses import dataclass, fields

from paxserve.admission import Admission, Learning, Reordering
from paxserve.batching import Batching
from paxserve.eviction import Eviction
from paxserve.gate import Gate, LearningGate
from paxserve.limits import Limits
from paxserve.placement import Placement
from paxserve.preemption import Preemption
from paxserve.prefix_cache import PrefixCache
from paxserve.request import Request
from paxserve.reservation import Reservation
from paxserve.victim import Victim


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policy of each axis, in the order of a request's life."""

    admission: Admission
    batching: Batching
    reservation: Reservation
    placement: Placement
    prefix_cache: PrefixCache
    eviction: Eviction
    victim: Victim
    preemption: Preemption
    gates: tuple[Gate, ...] = ()

    @property
    def shares(self) -> bool:
        """Whether two sequences may hold one block: their tables need not be one run, and nothing
        is promised ahead that only one of them could write.
        """
        return self.reservation.grows and not self.placement.contiguous

    @property
    def can_preempt(self) -> bool:
        """Whether a running request may have to make way."""
        return self.reservation.grows or self.admission.displaces_running

    @property
    def are_steady(self) -> bool:
        """Whether all declare that a step of decodes comes again as it was while nobody comes or
        goes: nobody learns from it, and what a growing request takes is known.
        """
        learns = isinstance(self.admission, Learning) or any(
            isinstance(gate, LearningGate) for gate in self.gates
        )
        declared = (
            getattr(self.batching, "is_steady", False),
            getattr(self.reservation, "is_exact", False),
        )
        return all(declared) and not learns

    def unread(self, *, is_forced: bool) -> set[str]:
        """Axes whose choice is never asked, given the others; `is_forced`: preemption is forced
        from outside.
        """
        unread = set() if self.prefix_cache.shares else {"eviction"}
        return unread if self.can_preempt or is_forced else unread | {"victim", "preemption"}

    def check(self, limits: Limits) -> None:
        """Refuse combinations that cannot run.

        Raises:
            ValueError: names the two sides that do not go together, with their values.
        """
        self._check_members()
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
        self._check_pairs(limits)
        if not self.reservation.grows and limits.num_usable_slots < limits.max_model_len:
            raise ValueError(
                f"reservation {_name(self.reservation)} holds max_model_len="
                f"{limits.max_model_len} tokens per request, but the pool has "
                f"{limits.num_usable_slots} slots ({limits.num_usable_blocks} blocks of "
                f"{limits.block_size}): give it more memory or lower max_model_len"
            )
        self._check_longest_fits(limits)

    def check_request(self, request: Request, limits: Limits) -> None:
        """Refuse a request that these choices cannot serve.

        Raises:
            ValueError: names the choice and what the request lacks.
        """
        lacks_length = request.origin.num_true_output_tokens is None
        if self.reservation.needs_true_lengths and lacks_length:
            raise ValueError(
                f"reservation {_name(self.reservation)} reads true output lengths, but request "
                f"{request.request_id} brings none: use a workload that knows them"
            )
        num_sequences = len(request.sequences)
        if num_sequences > 1 and not self.shares:
            promise = self.reservation.num_tokens(
                request, num_needed=request.num_prompt_tokens, limits=limits
            )
            num_blocks = num_sequences * -(-promise // limits.block_size)
            if num_blocks > limits.num_usable_blocks:
                raise ValueError(
                    f"request {request.request_id} has {num_sequences} sequences, for which "
                    f"reservation {_name(self.reservation)} holds {num_blocks} blocks; the pool "
                    f"has {limits.num_usable_blocks} of {limits.block_size} tokens"
                )
        if request.beams is not None and not self.shares:
            raise ValueError(
                f"beam search shares blocks, which reservation {_name(self.reservation)} with "
                f"placement {_name(self.placement)} does not allow: use on_demand and paged"
            )

    def _check_members(self) -> None:
        """Each policy has what its axis asks for, so that a wrong one is told before it serves."""
        axes = [(field.name, [getattr(self, field.name)]) for field in fields(self)]
        for axis, found in axes:
            protocol = _PROTOCOLS[axis]
            policies = found[0] if axis == "gates" else found
            if not isinstance(policies, tuple | list):
                raise ValueError(f"gates must be a tuple of gates, got {policies!r}")
            asked = {*vars(protocol), *protocol.__annotations__}
            for policy in policies:
                if isinstance(policy, type):
                    raise ValueError(f"{axis} must be an object, got the class {policy.__name__}")
                missing = [n for n in asked if not n.startswith("_") and not hasattr(policy, n)]
                if missing:
                    raise ValueError(
                        f"{axis} {_name(policy)} lacks {', '.join(sorted(missing))}, which "
                        f"paxserve/{axis.removesuffix('s')}/__init__.py asks of it"
                    )

    def _check_pairs(self, limits: Limits) -> None:
        if self.prefix_cache.shares and self.placement.contiguous:
            raise ValueError(
                f"prefix_cache {_name(self.prefix_cache)} shares blocks between tables, but "
                f"placement {_name(self.placement)} lays each table out as one run: use paged"
            )
        if isinstance(self.admission, Reordering) and self.placement.contiguous:
            raise ValueError(
                f"admission {_name(self.admission)} orders by what is cached, but placement "
                f"{_name(self.placement)} lays each table out as one run, so nothing is: use paged"
            )
        if isinstance(self.admission, Reordering) and not self.prefix_cache.shares:
            raise ValueError(
                f"admission {_name(self.admission)} orders by what is cached, but prefix_cache "
                f"{_name(self.prefix_cache)} finds nothing: use hash_chain or radix"
            )
        if self.preemption.swaps and not limits.num_host_blocks:
            raise ValueError(
                f"preemption {_name(self.preemption)} copies blocks to the host, but there are no "
                "host blocks: set limits.swap_space_gib"
            )

    def _check_longest_fits(self, limits: Limits) -> None:
        num_blocks = limits.blocks_per_row
        empty = self.placement.open(limits.num_blocks)
        if not self.reservation.grows and empty.num_unfit(num_blocks) == empty.num_free:
            raise ValueError(
                f"reservation {_name(self.reservation)} may ask for {num_blocks} blocks, "
                f"max_model_len={limits.max_model_len} in blocks of {limits.block_size}, for which "
                f"placement {_name(self.placement)} has no place even in an empty pool of "
                f"{limits.num_usable_blocks}: give it more memory or lower max_model_len"
            )


def _name(policy: object) -> str:
    return type(policy).__name__


_PROTOCOLS: dict[str, type] = {
    "admission": Admission,
    "gates": Gate,
    "batching": Batching,
    "reservation": Reservation,
    "placement": Placement,
    "prefix_cache": PrefixCache,
    "eviction": Eviction,
    "victim": Victim,
    "preemption": Preemption,
}
