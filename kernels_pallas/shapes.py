"""Named problem shapes, shared by tests, benchmarks and compile checks, so that all speak of the
same case.

Owns: the numbers of each case. Out: frozen dataclasses. Must not know: arrays, devices, backends.

A name is model/work: the heads of a model, and the rows of a step.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any


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
        dtype, kv_dtype: of queries and of the cache, as numpy names them; int8 and float8_e4m3fn
            caches have scales.
    """

    q_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    max_model_len: int = 8192
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

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

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, V and scales that the queries see: the least a kernel can read."""
        itemsize = {"float32": 4, "bfloat16": 2}.get(self.kv_dtype, 1)
        per_token = 2 * self.num_kv_heads * (self.head_dim * itemsize + 4 * self.is_quantised)
        return per_token * sum(self._seen(q, c) for q, c in self._rows)

    @property
    def num_flops(self) -> int:
        """Multiplications and additions of both products, causal ones only."""
        pairs = 0
        for q, context in self._rows:
            for position in range(context - q, context):
                pairs += min(position + 1, self.sliding_window or position + 1)
        return 4 * pairs * self.num_heads * self.head_dim

    def as_data(self) -> dict[str, Any]:
        """Plain data; `rows` are [how many, q_len, context_len] of neighbours that are alike."""
        rows = [[len(list(alike)), *row] for row, alike in groupby(self._rows)]
        sizes = asdict(self)
        return {"rows": rows} | {n: v for n, v in sizes.items() if not n.endswith("_lens")}

    def small(self) -> "AttentionShape":
        """The same case for interpret mode: fewer rows, at most two kv heads, short contexts.

        What makes a case what it is stays: the group of query heads per kv head, the head dim, the
        block size, which rows are decodes, whether contexts are longer than the step.
        """
        rows = [self._rows[0], self._rows[-1]]
        if self.num_rows > 2:
            rows.insert(1, self._rows[1])
        small = [(_shrunk(q), _shrunk(c) + 3 * (c > q)) for q, c in rows[: self.num_rows]]
        num_kv_heads = min(2, self.num_kv_heads)
        window = self.sliding_window
        return replace(
            self,
            q_lens=tuple(q for q, _ in small),
            context_lens=tuple(c for _, c in small),
            num_heads=num_kv_heads * self.num_heads // self.num_kv_heads,
            num_kv_heads=num_kv_heads,
            max_model_len=4 * self.block_size + max(c for _, c in small),
            sliding_window=None if window is None else 2 * self.block_size + 1,
        )

    @property
    def _rows(self) -> list[tuple[int, int]]:
        return list(zip(self.q_lens, self.context_lens, strict=True))

    def _seen(self, q_len: int, context_len: int) -> int:
        if self.sliding_window is None:
            return context_len
        return min(context_len, q_len + self.sliding_window - 1)


def _shrunk(length: int) -> int:
    """About a fiftieth, and never a multiple of a block."""
    return length if length == 1 else 5 + length // 48


def _decode(num_rows: int, context_len: int) -> AttentionShape:
    return _rows(((1, context_len),) * num_rows)


def _rows(rows: tuple[tuple[int, int], ...]) -> AttentionShape:
    longest = max(context for _, context in rows)
    return AttentionShape(
        q_lens=tuple(q for q, _ in rows),
        context_lens=tuple(c for _, c in rows),
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_model_len=max(8192, longest),
    )


WORK: Mapping[str, AttentionShape] = MappingProxyType(
    {
        "decode_1x4k": _decode(1, 4096),
        "decode_64x4k": _decode(64, 4096),
        "decode_256x1k": _decode(256, 1024),
        "decode_1x128k": _decode(1, 131_072),
        "prompts_8x2k": _rows(((2048, 2048),) * 8),
        # A chunk in the middle of a prompt beside decodes.
        "mixed_64+512": _rows(((1, 4096),) * 64 + ((512, 2048),)),
    }
)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of one model, of one device of its tensor-parallel group."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None


MODELS: Mapping[str, Heads] = MappingProxyType(
    {
        "smollm2-135m": Heads(9, 3, 64),
        "llama-3-8b": Heads(32, 8, 128),
        "llama-3-70b": Heads(64, 8, 128),
        "llama-3-70b-tp8": Heads(8, 1, 128),
        "qwen2.5-7b": Heads(28, 4, 128),
        "mistral-7b": Heads(32, 8, 128, sliding_window=4096),
    }
)


def shape_of(model: str, work: str) -> AttentionShape:
    """The shape of this name.

    Raises:
        ValueError: an unknown model or work.
    """
    if model not in MODELS or work not in WORK:
        raise ValueError(
            f"no shape {model}/{work}: models are {list(MODELS)}, work is {list(WORK)}"
        )
    heads = MODELS[model]
    return replace(
        WORK[work],
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        sliding_window=heads.sliding_window,
    )


def _variants() -> dict[str, AttentionShape]:
    """Other block sizes and cache dtypes on the heads of Llama-3-8B, and decodes whose contexts
    exceed their window: 4,096 tokens of context are seen whole through one of 4,096.
    """
    long = replace(shape_of("mistral-7b", "decode_64x4k"), context_lens=(8192,) * 64)
    found = {"mistral-7b/decode_64x8k": replace(long, max_model_len=16_384)}
    for work in ("decode_64x4k", "mixed_64+512"):
        base = shape_of("llama-3-8b", work)
        for block_size in (32, 64, 128):
            found[f"llama-3-8b/{work}/block{block_size}"] = replace(base, block_size=block_size)
        for short, kv_dtype in (("int8", "int8"), ("fp8", "float8_e4m3fn")):
            found[f"llama-3-8b/{work}/{short}"] = replace(base, kv_dtype=kv_dtype)
            found[f"llama-3-8b/{work}/{short}/block128"] = replace(
                base, kv_dtype=kv_dtype, block_size=128
            )
    return found


SHAPES: Mapping[str, AttentionShape] = MappingProxyType(
    {f"{model}/{work}": shape_of(model, work) for model in MODELS for work in WORK} | _variants()
)
