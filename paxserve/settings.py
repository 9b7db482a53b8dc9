"""Settings of an engine beside its policies, and the reader that notices what nobody reads.

Owns: `EngineSettings` and `Knobs`. In: plain nested dictionaries. Out: typed settings. Must not
know: Hydra, jax.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes and switches, under vLLM's names where it has them.

    Attributes:
        max_num_seqs: rows of the batch.
        max_num_batched_tokens: tokens per step; None: 512, or max_model_len where prompts are
            never split.
        max_model_len: prompt plus output; None: the model's own.
        block_size: KV slots per block.
        memory_utilization: share of the memory that is left which KV may take.
        kv_cache_memory_bytes: exactly this much KV instead, of each device.
        tensor_parallel_size: devices that share the model: its heads, MLP and vocabulary, which it
            must divide.
        num_blocks_override: blocks the host may hand out, null block included; the device's pool
            and so the compiled shapes stay as they are.
        num_slots_override: the same in tokens, so that runs with different block sizes have equal
            memory: the host hands out as many whole blocks as that is, and the null block.
        swap_space_gib: memory of the host to which preempted requests may be swapped out.
        num_host_blocks_override: exactly so many host blocks instead.
        preempt_every_steps: preempt one request every so many steps, memory short or not; 0 never.
        row_buckets, token_buckets: padded shapes; empty: three rungs each.
        kernel: attention backend, or auto.
        kv_cache_dtype: auto (that of the activations), int8 or fp8.
        debug: check every step's block ids, lengths and slots on the host before they are sent.
        strict: a compilation after warm-up is an error.

    Raises:
        ValueError: a value that no engine could mean; the message names it.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int = 1
    num_blocks_override: int | None = None
    num_slots_override: int | None = None
    swap_space_gib: float = 0.0
    num_host_blocks_override: int | None = None
    preempt_every_steps: int = 0
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    kernel: str = "auto"
    kv_cache_dtype: str = "auto"
    debug: bool = False
    strict: bool = True

    @property
    def num_host_handed_blocks(self) -> int | None:
        """Blocks that the host may hand out, null block included; None: all of the device's."""
        if self.num_slots_override is None:
            return self.num_blocks_override
        return 1 + self.num_slots_override // self.block_size

    def __post_init__(self) -> None:
        """Check each value by itself; `Limits` and the policies check them together."""
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            is_unset = value is None and name not in _REQUIRED
            if not is_unset and not _is_integer(value, low):
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        for name in ("row_buckets", "token_buckets"):
            buckets = getattr(self, name)
            if not isinstance(buckets, tuple | list) or not all(_is_integer(b, 1) for b in buckets):
                raise ValueError(f"{name} must be a list of integers >= 1, got {buckets!r}")
        share = self.memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"memory_utilization must be in (0, 1], got {share!r}")
        if self.num_blocks_override is not None and self.num_slots_override is not None:
            raise ValueError("num_blocks_override and num_slots_override both size the pool")
        _check_swap_space(self.swap_space_gib)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {self.kv_cache_dtype!r}"
            )
        for name in ("debug", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")


KV_CACHE_DTYPES = ("auto", "int8", "fp8")
MOST = 2**31 - 1  # counts travel as int32

_LOWEST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "tensor_parallel_size": 1,
    "num_blocks_override": 2,
    "num_slots_override": 1,
    "num_host_blocks_override": 0,
    "preempt_every_steps": 0,
}
_REQUIRED = ("max_num_seqs", "block_size", "tensor_parallel_size", "preempt_every_steps")


def _check_swap_space(gib: object) -> None:
    is_number = isinstance(gib, int | float) and not isinstance(gib, bool)
    if not is_number or not 0 <= gib < math.inf:  # type: ignore[operator]
        raise ValueError(f"swap_space_gib must be a number of GiB >= 0, got {gib!r}")


def _is_integer(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


class Section(Mapping[str, Any]):
    """One group of settings; remembers which keys were read."""

    def __init__(self, name: str, values: Mapping[str, Any], read: set[str]) -> None:
        self.name, self._values, self._read = name, values, read

    def __getitem__(self, key: str) -> Any:
        self._read.add(self.name)
        self._read.add(f"{self.name}.{key}")
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Knobs:
    """All settings of a run.

    Args:
        values: group -> key -> value.
        explicit: the keys (`group` or `group.key`) that the user set.
    """

    def __init__(self, values: Mapping[str, Mapping[str, Any]], explicit: Iterable[str]) -> None:
        self._values = values
        self._explicit = tuple(explicit)
        self._read: set[str] = set()

    def section(self, name: str) -> Section:
        """A group, empty if the config has none of that name; `workload.arrivals` lies in
        `workload`.
        """
        return Section(name, self.plain(name), self._read)

    def plain(self, name: str) -> dict[str, Any]:
        """A group's values, without saying that they are read."""
        values: Any = self._values
        for part in name.split("."):
            values = values.get(part) or {}
            if not isinstance(values, Mapping):
                group = name.replace(".", "/")
                raise ValueError(f"{name} is a group: choose with {group}={values}")
        return dict(values)

    def is_set(self, key: str) -> bool:
        """Whether the user set `group.key`."""
        return key in self._explicit

    def used(self, name: str) -> None:
        """A group was used, with every key that it has."""
        self._read |= {name, *(f"{name}.{key}" for key in self.plain(name))}

    def chosen(self, name: str) -> None:
        """The choice made for a group was used, even if it has no keys."""
        self._read.add(name)

    def check_all_read(self) -> None:
        """Call when everything is built.

        Raises:
            ValueError: the user set something that nothing reads.
        """
        # A key of three parts sets an entry of a setting that is itself a mapping.
        unread = [k for k in self._explicit if ".".join(k.split(".")[:2]) not in self._read]
        if unread:
            raise ValueError(
                f"{', '.join(unread)} was set, but nothing reads it with the choices made: "
                "remove it, or choose what reads it"
            )


def from_section[T](
    cls: type[T], section: Section, *, unread: Iterable[str] = (), elsewhere: Iterable[str] = ()
) -> T:
    """A dataclass made from a section's keys.

    Args:
        cls: the dataclass.
        section: the keys.
        unread: keys that are legal but not read, given the other choices.
        elsewhere: fields that another section sets; here they are unknown.

    Raises:
        ValueError: the section has a key that the dataclass does not.
    """
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    known = fields - set(elsewhere)
    unknown = [key for key in section if key not in known]
    if unknown:
        raise ValueError(f"unknown settings {section.name}.{unknown[0]}; there are {sorted(known)}")
    values = {key: section[key] for key in section if key not in set(unread)}
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
