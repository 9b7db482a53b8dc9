"""The sizes of a model, for whoever asks what it takes without having its weights.

Owns: `Dimensions`, and every count that follows from the sizes alone. In: a `ModelConfig`, or the
keys of `configs/model/*.yaml`. Out: weights, and bytes of KV. Must not know: hardware, time.
"""

from dataclasses import dataclass, replace

from paxserve.models.config import ModelConfig
from paxserve.numbers import flag, whole

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = 4  # float32, one per token and head of keys and one of values in an 8-bit cache
_MOST = 10**7
_MOST_DEVICES = 10**5


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Attributes:

    num_layers, hidden_size, mlp_size, vocab_size, max_position: as of `ModelConfig`.
    num_heads, num_kv_heads, head_dim: of attention.
    gated_mlp: three matrices in the MLP, as Llama; else two, as OPT and GPT.
    tie_embeddings: one matrix is embedding and output.
    dtype: of weights and activations.
    """

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    gated_mlp: bool = True
    tie_embeddings: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Check every size."""
        for name in _SIZES:
            whole(name, getattr(self, name), low=1, high=_MOST)
        flag("gated_mlp", self.gated_mlp)
        flag("tie_embeddings", self.tie_embeddings)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    @classmethod
    def of(cls, config: ModelConfig, *, dtype: str) -> "Dimensions":
        """Those of a model that can be served."""
        sizes = {name: getattr(config, name) for name in _SIZES}
        return cls(**sizes, tie_embeddings=config.tie_embeddings, dtype=dtype)

    @property
    def weight_bytes_each(self) -> int:
        """Bytes of one weight, and of one activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the matrices of one layer: q, k and v together, o, and the MLP's, of which
        gate and up read the same input.
        """
        d, f = self.hidden_size, self.mlp_size
        n, k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        up = 2 * f if self.gated_mlp else f
        return ((d, n + 2 * k), (n, d), (d, up), (f, d))

    @property
    def num_layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        return sum([rows * columns for rows, columns in self.linear_shapes])

    @property
    def num_head_weights(self) -> int:
        """Weights of the matrix that makes logits."""
        return self.hidden_size * self.vocab_size

    @property
    def num_weights(self) -> int:
        """All matrices; norms and biases are a ten-thousandth of them and left out."""
        num_tables = 1 if self.tie_embeddings else 2
        return self.num_layers * self.num_layer_weights + num_tables * self.num_head_weights

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        return self.num_weights * self.weight_bytes_each

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto") -> int:
        """KV of one token in all layers; an 8-bit cache has its scales beside it.

        Args:
            kv_cache_dtype: auto (that of the activations), int8 or fp8.

        Raises:
            ValueError: it is none of these.
        """
        if kv_cache_dtype not in ("auto", "int8", "fp8"):
            raise ValueError(
                f"kv_cache_dtype must be one of auto, int8, fp8, got {kv_cache_dtype!r}"
            )
        heads = 2 * self.num_layers * self.num_kv_heads
        if kv_cache_dtype == "auto":
            return heads * self.head_dim * self.weight_bytes_each
        return heads * (self.head_dim * DTYPE_BYTES[kv_cache_dtype] + SCALE_BYTES)

    def share(self, num_devices: int) -> "Dimensions":
        """What one device of a group has of the heads, the MLP and the vocabulary.

        Raises:
            ValueError: one of them does not divide, or there is no such group.
        """
        whole("tensor_parallel_size", num_devices, low=1, high=_MOST_DEVICES)
        parts = {}
        for name in ("num_kv_heads", "num_heads", "mlp_size", "vocab_size"):
            size = getattr(self, name)
            if size % num_devices and name != "vocab_size":
                raise ValueError(
                    f"tensor_parallel_size={num_devices} does not divide {name}={size}"
                )
            parts[name] = -(-size // num_devices)  # a vocabulary is padded
        return replace(self, **parts)


_SIZES = (
    "num_layers",
    "hidden_size",
    "mlp_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position",
)
