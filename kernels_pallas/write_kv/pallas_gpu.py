"""Writing the cache on Hopper GPUs, in Pallas Mosaic GPU: rotation and scatter in one kernel.

Owns: the kernel. A program takes as many tokens as fill 64 rows (token, kv head): their K and V,
contiguous in the step's arrays, come by one TMA copy each; keys are rotated in registers; then each
token's `[K, H]` goes to its slot by one strided TMA copy. The cache is a reference: nothing else of
it moves. Where it is quantised, XLA does the rotation and the rounding in one fusion before, and
scatters the scales, 4 bytes a head, which no TMA copy can move.

In and out: the contract in `write_kv/__init__.py`. Must not know: what a block table is.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.jax_versions import Ref, store
from kernels_pallas.paged_attention.layout import KvDims, kv_dims
from kernels_pallas.quantised import quantise
from kernels_pallas.rotary import rotate

ROWS = 64  # (token, kv head) of a program: what one warpgroup holds as a matrix
COPY_BYTES = 128  # alignment of a copy's memory on the chip

# Layouts are given by hand: inferring them from these copies can take minutes.
PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def write_kv(
    kv_blocks: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    kv_scales: jax.Array | None = None,
    device_kind: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `kernels_pallas.write_kv.write_kv`."""
    check_supported(k, kv_blocks, device_kind=device_kind)
    dims = kv_dims(kv_blocks.shape)
    if kv_scales is not None:
        k = k if rotation is None else rotate(k, *rotation)
        rotation = None
        (k, k_scales), (v, v_scales) = quantise(k, kv_blocks.dtype), quantise(v, kv_blocks.dtype)
        block, offset = slots // dims.block_size, slots % dims.block_size
        scales = jnp.stack([k_scales, v_scales], axis=1)  # [T, 2, K]
        kv_scales = kv_scales.at[block, :, :, offset].set(scales, mode="drop")
    return _scatter(kv_blocks, k, v, slots, rotation, dims), kv_scales


def check_supported(
    k: jax.Array | jax.ShapeDtypeStruct,
    kv_blocks: jax.Array | jax.ShapeDtypeStruct,
    *,
    device_kind: str | None,
) -> None:
    """Everything this backend refuses, by shapes and dtypes; of devices `paged_attention` does.

    Raises:
        NotImplementedError: it is refused.
    """
    del device_kind
    dims = kv_dims(kv_blocks.shape)
    token_bytes = dims.num_kv_heads * dims.head_dim * kv_blocks.dtype.itemsize
    for is_met, need in (
        (k.dtype == jnp.bfloat16, f"bfloat16 keys and values, got {k.dtype}"),
        (dims.head_dim in (64, 128), f"head_dim 64 or 128, got {dims.head_dim}"),
        (dims.num_kv_heads <= ROWS, f"at most {ROWS} kv heads, got {dims.num_kv_heads}"),
        (
            token_bytes % COPY_BYTES == 0,
            f"a token's keys to be a multiple of {COPY_BYTES} bytes, got {token_bytes}",
        ),
    ):
        if not is_met:
            raise NotImplementedError(f"pallas_gpu: needs {need}; use the xla or reference backend")


def _scatter(
    kv_blocks: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    dims: KvDims,
) -> jax.Array:
    """Numbers of the cache's dtype into their slots."""
    num_heads, head_dim = dims.num_kv_heads, dims.head_dim
    tokens = 1 << ((ROWS // num_heads).bit_length() - 1)
    missing = max(0, tokens - k.shape[0])
    num_tokens = k.shape[0] + missing
    num_slots = dims.num_blocks * dims.block_size
    slots = jnp.pad(slots, (0, missing), constant_values=num_slots)
    rows = [_rows(x, missing) for x in (k, v)]
    if rotation is not None:
        # The same for every layer of a step, so the repeated phases are made once.
        rows += [_rows(jnp.repeat(x[:, None], num_heads, axis=1), missing) for x in rotation]

    def body(slots_ref: Ref, inputs: list[Ref], cache: Ref, staged: list[Ref], full: Ref) -> None:
        wanted = lax.axis_index("program") * tokens
        first = jnp.minimum(wanted, num_tokens - tokens)  # the last program is moved back to fit
        used = tokens * num_heads
        for source, place in zip(inputs, staged, strict=True):
            lines = pl.ds(first * num_heads, used)
            plgpu.copy_gmem_to_smem(source.at[lines], place.at[pl.ds(0, used)], full)
        plgpu.barrier_wait(full)
        if rotation is not None:
            _rotate(*staged[:1], *staged[2:])

        @pl.loop(0, tokens)
        def _token(i: jax.Array) -> None:
            slot = slots_ref[first + i]

            @pl.when((slot < num_slots) & (first + i >= wanted))
            def _send() -> None:
                block = lax.div(slot, jnp.int32(dims.block_size))
                offset = lax.rem(slot, jnp.int32(dims.block_size))
                for which in range(2):
                    plgpu.copy_smem_to_gmem(
                        staged[which].at[pl.ds(i * num_heads, num_heads)],
                        cache.at[block * 2 + which, :, offset],
                    )

        plgpu.wait_smem_to_gmem(0)

    cache = jax.new_ref(kv_blocks.reshape(-1, num_heads, dims.block_size, head_dim))
    plgpu.kernel(
        body,
        scratch_types=(
            [plgpu.SMEM((ROWS, x.shape[1]), x.dtype) for x in rows],
            plgpu.Barrier(num_arrivals=len(rows)),
        ),
        grid=(-(-num_tokens // tokens),),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
    )(slots, rows, cache)
    return jax.freeze(cache).reshape(kv_blocks.shape)


def _rows(x: jax.Array, missing: int) -> jax.Array:
    """[T, K, ...] -> [(T + missing) * K, ...]."""
    padded = jnp.pad(x, ((0, missing), (0, 0), (0, 0)))
    return padded.reshape(-1, x.shape[-1])


def _rotate(keys: Ref, cos: Ref, sin: Ref) -> None:
    """`kernels_pallas.rotary.rotate` of rows [64, H] where they lie; cos and sin [64, H/2]."""
    half = keys.shape[1] // 2
    layout = plgpu.Layout.WGMMA
    first, second = (
        plgpu.load(keys.at[:, pl.ds(start, half)], layout=layout, optimized=False).astype(
            jnp.float32
        )
        for start in (0, half)
    )
    c = plgpu.load(cos, layout=layout, optimized=False)
    s = plgpu.load(sin, layout=layout, optimized=False)
    store(keys.at[:, pl.ds(0, half)], (first * c - second * s).astype(keys.dtype))
    store(keys.at[:, pl.ds(half, half)], (second * c + first * s).astype(keys.dtype))
    plgpu.commit_smem()
