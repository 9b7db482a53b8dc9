"""What one device does in a step: floating point operations, and bytes that cross its memory or its
links, part by part.

Owns: the counting, from the sizes of a model. In: `Dimensions`, a number of devices, a `StepShape`.
Out: `Work` per part. Must not know: how fast anything is.

Source: Williams et al., "Roofline", CACM 2009; Pope et al., "Efficiently scaling transformer
inference", 2022 (what a group of devices exchanges); the sizes of each part are plain counting.
"""

from dataclasses import dataclass
from typing import NamedTuple

from paxserve.models.dimensions import Dimensions
from paxserve.step_shape import StepShape


class Work(NamedTuple):
    """Of one part of a step, on one device."""

    flop: float
    num_bytes: float


class StepWork(NamedTuple):
    """linear: the matrices of all layers. head: the logits. decodes, chunks: attention. links:
    bytes that leave a device, in so many sums over the group, one after the other.
    """

    linear: Work
    head: Work
    decodes: Work
    chunks: Work
    link_bytes: float
    num_sums: int

    @property
    def flop(self) -> float:
        """All parts together."""
        return self.linear.flop + self.head.flop + self.decodes.flop + self.chunks.flop

    @property
    def num_bytes(self) -> float:
        """All parts together, links left out."""
        parts = self.linear.num_bytes + self.head.num_bytes
        return parts + self.decodes.num_bytes + self.chunks.num_bytes


@dataclass(frozen=True, slots=True)
class WorkCounter:
    """Counts steps of one model on a group of devices.

    A matrix product reads its weights once, its input and writes its output; it works on whole
    tiles of `tile_tokens` tokens. Attention reads the KV of each row's context once, and computes
    four operations per query channel and pair of tokens. Over a group each device has its share of
    heads, MLP and vocabulary; two sums of the activations per layer cross the links, each in a
    ring: 2 (n - 1) / n of the bytes leave every device.
    """

    part: Dimensions
    num_devices: int
    tile_tokens: int
    kv_bytes_per_token: int

    @classmethod
    def of(
        cls,
        model: Dimensions,
        *,
        num_devices: int = 1,
        tile_tokens: int = 1,
        kv_cache_dtype: str = "auto",
    ) -> "WorkCounter":
        """For a whole model.

        Raises:
            ValueError: the devices do not divide it.
        """
        part = model.share(num_devices)
        return cls(part, num_devices, tile_tokens, part.kv_bytes_per_token(kv_cache_dtype))

    def of_step(self, shape: StepShape) -> StepWork:
        """The work of one step on one device."""
        part, each = self.part, self.part.weight_bytes_each
        tile = self.tile_tokens
        tokens, rows = shape.padded_tokens, shape.num_samples
        tiled = -(-tokens // tile) * tile
        tiled_rows = -(-rows // tile) * tile
        layers, weights, head = part.num_layers, part.num_layer_weights, part.num_head_weights
        crossing = sum([a + b for a, b in part.linear_shapes]) + 4 * part.hidden_size
        linear = Work(
            2.0 * layers * weights * tiled, float(layers * each * (weights + tokens * crossing))
        )
        logits = Work(
            2.0 * head * tiled_rows,
            float(each * (head + rows * (part.hidden_size + 2 * part.vocab_size)) if rows else 0),
        )
        per_pair = 4.0 * layers * part.num_heads * part.head_dim
        queries = 2 * layers * each * part.num_heads * part.head_dim
        kv = self.kv_bytes_per_token
        decoding = Work(
            per_pair * shape.decode_context,
            float(kv * shape.decode_context + queries * shape.num_decodes),
        )
        chunked = Work(
            per_pair * shape.chunk_pairs,
            float(kv * shape.chunk_context + queries * shape.chunk_tokens),
        )
        others = self.num_devices - 1
        sums = 2 * layers * each * tokens * part.hidden_size
        return StepWork(
            linear,
            logits,
            decoding,
            chunked,
            link_bytes=2.0 * sums * others / self.num_devices,
            num_sums=2 * layers if others else 0,
        )
