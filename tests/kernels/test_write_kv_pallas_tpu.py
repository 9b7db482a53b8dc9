"""The TPU write_kv kernel, interpreted on the CPU, races looked for: every bit of the cache.

The cache starts with random bits, NaNs of all payloads among them, and is compared as bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.interpret import interpreted
from kernels_pallas.paged_attention import tpu_layout as layout
from kernels_pallas.quantised import QUANTISED_DTYPES
from kernels_pallas.write_kv import pallas_tpu, write_kv

F32, BF16, INT8, FP8 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn
NUM_BLOCKS = 12
BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def as_bits(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.lax.bitcast_convert_type(x, BITS[x.dtype.itemsize]))


def random_bits(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    kind = BITS[jnp.dtype(dtype).itemsize]
    bits = np.random.default_rng(0).integers(0, jnp.iinfo(kind).max, shape, np.uint32, True)
    return jax.lax.bitcast_convert_type(jnp.asarray(bits).astype(kind), dtype)


def prompt(first: int, num_tokens: int) -> list[int]:
    return list(range(first, first + num_tokens))


def scattered(block_size: int) -> list[int]:
    """Every second slot: each group is met many times."""
    return list(range(block_size, 3 * block_size, 2))


def check(
    slots: list[int], *, dtype: jnp.dtype, block_size: int = 16, num_kv_heads: int = 2,
    head_dim: int = 64, is_rotated: bool = True,
) -> None:  # fmt: skip
    """Against the reference, which writes one token after the other."""
    rng = np.random.default_rng(1)
    is_quantised = jnp.dtype(dtype) in QUANTISED_DTYPES
    tokens = [rng.standard_normal((len(slots), num_kv_heads, head_dim), np.float32) for _ in "kv"]
    k, v = (jnp.asarray(x).astype(BF16 if is_quantised else dtype) for x in tokens)
    # Quarter turns are exact: other products may or may not be fused with their sum.
    quarters = rng.integers(0, 4, (len(slots), head_dim // 2))
    unit = jnp.asarray([1.0, 0.0, -1.0, 0.0])
    rotation = (unit[quarters], unit[(quarters + 3) % 4]) if is_rotated else None
    blocks = random_bits((NUM_BLOCKS, 2, num_kv_heads, block_size, head_dim), dtype)
    scales = random_bits(blocks.shape[:-1], F32) if is_quantised else None
    padded = jnp.asarray(slots, jnp.int32)
    options = {"rotation": rotation, "kv_scales": scales}
    expected, expected_scales = write_kv(blocks, k, v, padded, backend="reference", **options)

    laid_scales = None if scales is None else layout.lay_scales(scales)
    with interpreted("pallas_tpu", detect_races=True):
        got, got_scales = write_kv(
            layout.lay_kv(blocks), k, v, padded, rotation=rotation, kv_scales=laid_scales,
            backend="pallas_tpu",
        )  # fmt: skip
    dims = layout.kv_dims(got.shape)
    got = layout.plain_kv(got)
    np.testing.assert_array_equal(as_bits(got), as_bits(expected))
    if scales is not None:
        got_scales = layout.plain_scales(got_scales, dims)
        np.testing.assert_array_equal(as_bits(got_scales), as_bits(expected_scales))


PADDING = [NUM_BLOCKS * 16, 2**30, 2**31 - 1]


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        ([17], {"dtype": BF16}),
        ([5, *PADDING, 190, *prompt(37, 22), *prompt(145, 15)], {"dtype": BF16, "head_dim": 128}),
        ([21, 190, 44, 97, 130, 3, 64, 80, 112, 160, 176], {"dtype": F32}),
        (scattered(16), {"dtype": BF16, "num_kv_heads": 3}),
        (PADDING, {"dtype": BF16, "is_rotated": False}),
        ([*prompt(20, 100), 3, *PADDING, 9], {"dtype": INT8, "num_kv_heads": 5}),
        ([*prompt(70, 60), 200, 9], {"dtype": FP8, "block_size": 64, "num_kv_heads": 1}),
    ],
    ids=[
        "one token", "prompt and padding", "decodes", "scattered", "padding", "int8", "fp8",
    ],
)  # fmt: skip
def test_every_bit(slots: list[int], options: dict[str, object]) -> None:
    check(slots, **options)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, INT8, FP8], ids=lambda d: jnp.dtype(d).name)
def test_many(dtype: jnp.dtype, head_dim: int, block_size: int) -> None:
    num_slots = NUM_BLOCKS * block_size
    some = np.random.default_rng(2).permutation(np.arange(130, num_slots))[:30].tolist()
    slots = [*prompt(block_size - 3, 70), *some, num_slots]
    check(slots, dtype=dtype, head_dim=head_dim, block_size=block_size)


def test_several_tiles_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt cut by the edge of a tile in the middle of a group; more runs than merge at once."""
    monkeypatch.setattr(pallas_tpu, "MAX_TILE_TOKENS", 32)
    check([*prompt(21, 70), 0, 176, 160, 144, 128], dtype=BF16)


def test_rotation_in_float32() -> None:
    """Any angle; equal but for the last bits."""
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((9, 2, 64), np.float32)) for _ in "kv")
    angles = jnp.linspace(-9, 9, 9 * 32).reshape(9, 32)
    options = {"rotation": (jnp.cos(angles), jnp.sin(angles))}
    plain, slots = jnp.zeros((3, 2, 2, 16, 64)), jnp.arange(20, 29, dtype=jnp.int32)
    expected, _ = write_kv(plain, k, v, slots, backend="reference", **options)
    with interpreted("pallas_tpu", detect_races=True):
        laid = layout.lay_kv(plain)
        got, _ = write_kv(laid, k, v, slots, backend="pallas_tpu", **options)
    np.testing.assert_allclose(layout.plain_kv(got), expected, rtol=1e-6, atol=1e-6)


def test_what_it_cannot_do() -> None:
    blocks, token = jnp.zeros(layout.kv_shape(3, 16, 2, 32)), jnp.zeros((1, 2, 32))
    with pytest.raises(NotImplementedError, match=r"head_dim must be 64 or .*, got head_dim=32"):
        write_kv(blocks, token, token, jnp.zeros(1, jnp.int32), backend="pallas_tpu")
