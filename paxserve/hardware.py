"""A kind of device: what it could do at most, from its data sheet.

Owns: `Hardware`, the fields of `configs/hardware/*.yaml`. In: numbers with a source each. Out: the
same, checked. Must not know: sizes of models, how much of it a kernel reaches (`cost_model/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paxserve.models.dimensions import DTYPE_BYTES
from paxserve.numbers import real, shown, whole


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
        whole("hardware.reserved_bytes", self.reserved_bytes, high=self.memory_bytes)
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
