"""Named problem shapes, shared by tests and benchmarks so that both speak of the same case.

Owns: the numbers of each case. Out: frozen dataclasses. Must not know: arrays, devices, backends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One ragged attention problem.

    Args:
        q_lens: tokens of this step, per row.
        context_lens: tokens whose KV is valid, per row, this step's included (>= q_len).
        num_heads: N, a multiple of `num_kv_heads`.
        num_kv_heads: K.
        head_dim: H.
        block_size: S.
        max_model_len: context the block table has room for, in tokens.
        sliding_window: tokens a query sees, itself included, or None.
    """

    q_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    max_model_len: int = 8192
    sliding_window: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.q_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold every context, plus the null block 0."""
        return 1 + sum(-(-context // self.block_size) for context in self.context_lens)

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of K and V that lie in the contexts: the least a kernel can read."""
        return 2 * sum(self.context_lens) * self.num_kv_heads * self.head_dim * itemsize


def _smollm2(q_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> AttentionShape:
    """SmolLM2-135M: 30 layers of 9 query heads over 3 kv heads of 64."""
    return AttentionShape(
        q_lens=q_lens, context_lens=context_lens, num_heads=9, num_kv_heads=3, head_dim=64
    )


SHAPES: Mapping[str, AttentionShape] = MappingProxyType(
    {
        # The bar of the first slice: a full batch decoding.
        "smollm2_decode_64x256": _smollm2((1,) * 64, (256,) * 64),
        # Same KV bytes scale, very uneven: a padded loop would do 25 times the work.
        "smollm2_decode_skewed": _smollm2((1,) * 64, (4000,) + (100,) * 63),
        "smollm2_prompt_512": _smollm2((512,), (512,)),
        "smollm2_chunk_512_at_2048": _smollm2((512,), (2048,)),
        "smollm2_mixed": _smollm2((256,) + (1,) * 63, (1024,) + (256,) * 63),
        # Small enough for interpret mode.
        "tiny_decode": AttentionShape(
            q_lens=(1, 1, 1),
            context_lens=(1, 4, 9),
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            block_size=4,
            max_model_len=16,
        ),
        "tiny_mixed": AttentionShape(
            q_lens=(1, 5, 3, 1),
            context_lens=(7, 5, 11, 1),
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            block_size=4,
            max_model_len=16,
        ),
    }
)
