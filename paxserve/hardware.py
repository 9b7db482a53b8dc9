"""A kind of device: what it could do at most, from its data sheet.

Owns: `Hardware`, the fields of `configs/hardware/*.yaml`. In: numbers with a source each. Out: the
same, checked. Must not know: sizes of models, how much of it a kernel reaches (`cost_model/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paxserve.models.dimensions import DTYPE_BYTES
from paxserve.numbers import real, shown, whole

# The least of any device that serves a model, the unit, and the power of ten of data sheets.
_LEAST = {
    "bytes_per_s": (1e8, "bytes per second", 9),
    "link_bytes_per_s": (1e8, "bytes per second", 9),
    "host_link_bytes_per_s": (1e8, "bytes per second", 9),
    "memory_bytes": (1e8, "bytes", 9),
    "flop_per_s": (1e9, "FLOP per second", 12),
}


def check_units(values: Mapping[str, Any]) -> None:
    """Refuse numbers as data sheets print them, in GB or TFLOP/s; what else can be wrong is checked
    when a `Hardware` is made.

    Raises:
        ValueError: names the setting, its unit, and what may have been meant.
    """
    for name, (least, unit, power) in _LEAST.items():
        value = values.get(name)
        if isinstance(value, Mapping):
            numbers = {f"{name}.{dtype}": rate for dtype, rate in value.items()}
        else:
            numbers = {} if name == "flop_per_s" else {name: value}  # a rate is per dtype
        for key, number in numbers.items():
            if isinstance(number, int | float) and 0 < number < least:
                meant = f"{number:g}e{power}" if unit != "bytes" else f"{number * 10**power:.0f}"
                raise ValueError(f"hardware.{key}={number:g} is in {unit}; did you mean {meant}?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Attributes:

    name: as people call it.
    flop_per_s: dense matrix products of numbers of a dtype; those that a source gives a rate for.
        float32 is without shortcuts (no TF32), as the engine multiplies it.
    bytes_per_s: of its memory.
    memory_bytes: all of it.
    reserved_bytes: of that, what no engine gets: context, compiler, fragmentation.
    link_bytes_per_s: to the other devices of a group, out of one device, one way; 0: has no link.
    all_reduce_latency_s: what the sum of a few bytes over a group takes, of any number of devices.
    host_link_bytes_per_s: between device and host, one way.
    tile_tokens: a matrix product takes the time of the next multiple of so many tokens.
    compile_target: what `paxserve check-kernels` calls it where JAX can compile for it without
        one, else None.
    platform: cpu, gpu or tpu.
    """

    name: str
    flop_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    reserved_bytes: int
    link_bytes_per_s: float
    all_reduce_latency_s: float
    host_link_bytes_per_s: float
    tile_tokens: int
    compile_target: str | None
    platform: str

    def __post_init__(self) -> None:
        """Check that the numbers can be divided by."""
        self._check_rates()
        for name in ("bytes_per_s", "host_link_bytes_per_s"):
            real(f"hardware.{name}", getattr(self, name), high=1e18, above=True)
        real("hardware.link_bytes_per_s", self.link_bytes_per_s, high=1e15)
        real("hardware.all_reduce_latency_s", self.all_reduce_latency_s, high=1.0)
        whole("hardware.memory_bytes", self.memory_bytes, low=1, high=10**15)
        whole("hardware.reserved_bytes", self.reserved_bytes, high=10**15)
        if self.reserved_bytes > self.memory_bytes:
            raise ValueError(
                f"hardware.reserved_bytes={self.reserved_bytes} is more than "
                f"hardware.memory_bytes={self.memory_bytes}"
            )
        whole("hardware.tile_tokens", self.tile_tokens, low=1, high=4096)
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"hardware.name must be a name, got {self.name!r}")
        if not isinstance(self.compile_target, str | None):
            raise ValueError(
                f"hardware.compile_target must be a name or null, got {self.compile_target!r}"
            )
        if self.platform not in ("cpu", "gpu", "tpu"):
            raise ValueError(f"hardware.platform must be cpu, gpu or tpu, got {self.platform!r}")

    @property
    def usable_bytes(self) -> int:
        """Memory that weights, KV and steps can have."""
        return self.memory_bytes - self.reserved_bytes

    def rate(self, dtype: str) -> float:
        """FLOP per second of products of weights and activations of `dtype`.

        Raises:
            ValueError: its data sheet has none.
        """
        if dtype not in self.flop_per_s:
            raise ValueError(
                f"model.dtype={dtype}: hardware {self.name} has no rate for it, only for "
                f"{', '.join(self.flop_per_s)}: add +hardware.flop_per_s.{dtype}=..., or take "
                "another dtype"
            )
        return self.flop_per_s[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which arithmetic is the bound.

        Raises:
            ValueError: as of `rate`.
        """
        return self.rate(dtype) / self.bytes_per_s

    def _check_rates(self) -> None:
        rates = self.flop_per_s
        if not isinstance(rates, Mapping) or not rates or not set(rates) <= set(DTYPE_BYTES):
            raise ValueError(
                "hardware.flop_per_s must be a rate per dtype, of "
                f"{', '.join(DTYPE_BYTES)}, got {shown(rates)}"
            )
        for dtype, rate in rates.items():
            real(f"hardware.flop_per_s.{dtype}", rate, high=1e18, above=True)
