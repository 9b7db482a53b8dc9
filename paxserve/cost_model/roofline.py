"""Each part of a step takes what its arithmetic or its bytes take, whichever is longer.

Nothing is fitted: the counts come from the model's sizes (`step_work.py`), the rates from the data
sheet of the device. How much of those rates kernels reach, and what the host takes per step, are
settings; their defaults are round numbers that published runs come near to, and studies that fit
them say so.

Source: Williams et al., "Roofline", CACM 2009; Agrawal et al., "Sarathi-Serve", OSDI 2024, 3.1
(linear and attention apart; tile quantisation); NanoFlow, OSDI 2025 (280 of 312 TFLOP/s measured).
"""

from dataclasses import dataclass

from paxserve.cost_model import Costs, Target
from paxserve.numbers import real
from paxserve.step_shape import StepShape
from paxserve.step_work import WorkCounter


@dataclass(frozen=True, slots=True)
class Roofline:
    """Attributes:

    compute_efficiency, bandwidth_efficiency, link_efficiency: share of the data sheet's rates;
        the last one of links to other devices and to the host.
    host_s_per_step, host_s_per_row: between two steps, when the device waits.
    """

    compute_efficiency: float
    bandwidth_efficiency: float
    link_efficiency: float
    host_s_per_step: float
    host_s_per_row: float

    def __post_init__(self) -> None:
        """Check that the rates can be divided by."""
        for name in ("compute_efficiency", "bandwidth_efficiency", "link_efficiency"):
            real(f"cost_model.{name}", getattr(self, name), high=1.5, above=True)
        for name in ("host_s_per_step", "host_s_per_row"):
            real(f"cost_model.{name}", getattr(self, name), high=60.0)

    def open(self, target: Target) -> Costs:
        """See `CostModel.open`."""
        hardware, num_devices = target.hardware, target.num_devices
        if num_devices > 1 and not hardware.link_bytes_per_s:
            raise ValueError(
                f"tensor_parallel_size={num_devices}: hardware {hardware.name} has no link"
            )
        counter = WorkCounter.of(
            target.model,
            num_devices=num_devices,
            tile_tokens=hardware.tile_tokens,
            kv_cache_dtype=target.kv_cache_dtype,
        )
        flop_per_s = hardware.rate(target.model.dtype) * self.compute_efficiency
        bytes_per_s = hardware.bytes_per_s * self.bandwidth_efficiency
        link_bytes_per_s = hardware.link_bytes_per_s * self.link_efficiency
        host_bytes_per_s = hardware.host_link_bytes_per_s * self.link_efficiency
        block_bytes = counter.kv_bytes_per_token * target.block_size

        def of(shape: StepShape) -> tuple[float, ...]:
            work = counter.of_step(shape)
            links_s = 0.0
            if num_devices > 1:
                links_s = work.link_bytes / link_bytes_per_s
                links_s += work.num_sums * hardware.all_reduce_latency_s
            copied_s = 2 * shape.num_copied * block_bytes / bytes_per_s
            return (
                max(work.linear.flop / flop_per_s, work.linear.num_bytes / bytes_per_s),
                max(work.head.flop / flop_per_s, work.head.num_bytes / bytes_per_s),
                max(work.decodes.flop / flop_per_s, work.decodes.num_bytes / bytes_per_s),
                max(work.chunks.flop / flop_per_s, work.chunks.num_bytes / bytes_per_s),
                links_s,
                copied_s + shape.num_swapped * block_bytes / host_bytes_per_s,
                self.host_s_per_step + self.host_s_per_row * shape.num_rows,
            )

        return Costs(TERMS, of, flop_per_s / bytes_per_s)


TERMS = ("linear", "head", "decode_attention", "chunk_attention", "links", "moves", "host")
