"""Settings of an engine beside its policies, and the reader that notices what nobody reads.

Owns: `EngineSettings` and `Knobs`. In: plain nested dictionaries. Out: typed settings. Must not
know: Hydra, jax.
"""

import dataclasses
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
        kv_cache_memory_bytes: exactly this much KV instead.
        num_blocks_override: blocks the host may hand out, null block included; the device's pool
            and so the compiled shapes stay as they are.
        row_buckets, token_buckets: padded shapes; empty: three rungs each.
        kernel: attention backend, or auto.
        strict: a compilation after warm-up is an error.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_blocks_override: int | None = None
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    kernel: str = "auto"
    strict: bool = True


class Section(Mapping[str, Any]):
    """One group of settings; remembers which keys were read."""

    def __init__(self, name: str, values: Mapping[str, Any], read: set[str]) -> None:
        self._name, self._values, self._read = name, values, read

    def __getitem__(self, key: str) -> Any:
        self._read.add(self._name)
        self._read.add(f"{self._name}.{key}")
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
        """A group, empty if the config has none of that name."""
        return Section(name, self._values.get(name) or {}, self._read)

    def chosen(self, name: str) -> None:
        """The choice made for a group was used, even if it has no keys."""
        self._read.add(name)

    def check_all_read(self) -> None:
        """Call when everything is built.

        Raises:
            ValueError: the user set something that nothing reads.
        """
        unread = [key for key in self._explicit if key not in self._read]
        if unread:
            raise ValueError(
                f"{', '.join(unread)} was set, but nothing reads it with the choices made: "
                "remove it, or choose what reads it"
            )


def from_section[T](cls: type[T], section: Section, *, unread: Iterable[str] = ()) -> T:
    """A dataclass made from a section's keys, but for those in `unread`.

    Raises:
        ValueError: the section has a key that the dataclass does not.
    """
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = [key for key in section if key not in known]
    if unknown:
        raise ValueError(f"unknown settings {unknown}; {cls.__name__} has {sorted(known)}")
    values = {key: section[key] for key in section if key not in set(unread)}
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
