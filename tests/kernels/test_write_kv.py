"""Conformance of the host backends of write_kv: exact slots, dropped padding, donated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import backend_module as attention_module
from kernels_pallas.paged_attention.layout import kv_shape
from kernels_pallas.write_kv import BACKENDS, write_kv

NUM_BLOCKS, HEADS, DIM = 6, 2, 8
PHASES = (jnp.ones((3, DIM // 2)), jnp.zeros((3, DIM // 2)))


def _tokens(count: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(count)
    k, v = (jnp.asarray(rng.standard_normal((count, HEADS, DIM), np.float32)) for _ in range(2))
    return k.astype(dtype), v.astype(dtype)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_writes_exactly_its_slots(backend: str, block_size: int, dtype: jnp.dtype) -> None:
    num_slots = NUM_BLOCKS * block_size
    slots = np.random.default_rng(0).permutation(np.arange(block_size, num_slots))[:5]
    # Padding: the first slot past the end, and far past it; all but the first share one slot.
    padded = np.concatenate([slots, [num_slots, num_slots, 2**30]]).astype(np.int32)
    k, v = _tokens(len(padded), dtype)
    kv = jnp.full(kv_shape(NUM_BLOCKS, block_size, HEADS, DIM), jnp.nan, dtype)
    written, scales = write_kv(kv, k, v, jnp.asarray(padded), backend=backend)
    assert scales is None
    got = np.asarray(written.astype(jnp.float32))

    expected = np.full(got.shape, np.nan, np.float32)
    for token, slot in enumerate(slots):
        block, offset = divmod(int(slot), block_size)
        expected[block, 0, :, offset] = np.asarray(k.astype(jnp.float32))[token]
        expected[block, 1, :, offset] = np.asarray(v.astype(jnp.float32))[token]
    np.testing.assert_array_equal(got, expected)
    assert np.isfinite(got).sum() == len(slots) * 2 * HEADS * DIM


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("num_tokens", [1, 64, 200])
def test_donated_cache_is_written_in_place(backend: str, num_tokens: int) -> None:
    write = jax.jit(
        lambda kv, k, v, slots: write_kv(kv, k, v, slots, backend=backend)[0], donate_argnums=0
    )
    kv = jnp.zeros(kv_shape(512, 16, HEADS, DIM))
    k, v = _tokens(num_tokens, jnp.float32)
    slots = jnp.arange(16, 16 + num_tokens, dtype=jnp.int32)
    memory = write.lower(kv, k, v, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == kv.nbytes
    assert memory.temp_size_in_bytes < kv.nbytes / 2
    pointer = kv.unsafe_buffer_pointer()
    for _ in range(3):
        kv = write(kv, k, v, slots)
    assert kv.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(
        np.asarray(kv)[1, :, :, 0], np.stack([np.asarray(k)[0], np.asarray(v)[0]])
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_changes_nothing(backend: str) -> None:
    kv = jnp.full(attention_module(backend).LAYOUT.kv_shape(3, 16, 2, 64), 7.0)
    none, no_slot = jnp.zeros((0, 2, 64)), jnp.zeros(0, jnp.int32)
    got, _ = write_kv(kv, none, none, no_slot, rotation=(none[:, 0, :32],) * 2, backend=backend)
    np.testing.assert_array_equal(got, kv)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((3, HEADS, 4))}, r"k=\(3, 2, 4\)"),
        ({"v": jnp.zeros((2, HEADS, DIM))}, r"v=\(2, 2, 8\)"),
        ({"slots": jnp.zeros(4, jnp.int32)}, r"slots=\(4,\)"),
        ({"slots": jnp.zeros(3, jnp.uint8)}, "slots=uint8"),
        ({"k": jnp.zeros((3, HEADS, DIM), jnp.bfloat16)}, "k=bfloat16, v=float32"),
        ({"kv_blocks": jnp.zeros((6, 2, HEADS, DIM))}, r"\[P, 2, K, S, H\]"),
        ({"rotation": PHASES[:1]}, "rotation must be cos and sin; got 1 arrays"),
        ({"rotation": (*PHASES, PHASES[0])}, "rotation must be cos and sin; got 3 arrays"),
        ({"rotation": (PHASES[0], PHASES[1][:2])}, r"shape \(3, 4\) .*; got sin=\(2, 4\)"),
        ({"backend": "fast"}, "backend='fast' is unknown"),
        ({"kv_blocks": (jnp.zeros(3), None)}, "kv_blocks must be an array; got a tuple: write_kv"),
        ({"device_kind": 3}, "device_kind=3"),
    ],
)
def test_wrong_arguments(change: dict[str, object], message: str) -> None:
    good = {
        "kv_blocks": jnp.zeros(kv_shape(NUM_BLOCKS, 4, HEADS, DIM)),
        "k": jnp.zeros((3, HEADS, DIM)),
        "v": jnp.zeros((3, HEADS, DIM)),
        "slots": jnp.zeros(3, jnp.int32),
        "backend": "xla",
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**{**good, **change})
