"""The oracle: paged attention said plainly, one token at a time, every context gathered densely.

Owns: what the right answer is. In and out: the contract in `paged_attention/__init__.py`. Memory
and time grow with T * M * S, so it is for tests and tiny models. Must not know: speed.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import layout

LAYOUT = layout


def paged_attention(
    q: jax.Array,
    kv_blocks: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_rows: jax.Array | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: jax.Array | None = None,
    device_kind: str | None = None,
    tiles: None = None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention.paged_attention`."""
    del device_kind, tiles
    num_kv_heads = layout.kv_dims(kv_blocks.shape).num_kv_heads
    num_tokens, num_heads, head_dim = q.shape

    def attend(token: jax.Array, query: jax.Array) -> jax.Array:
        """One token's query [N, H] -> [N, H]."""
        row = jnp.minimum(jnp.sum(cu_q_lens[1:] <= token), cu_q_lens.shape[0] - 2)
        own = context_lens[row] - cu_q_lens[row + 1] + token
        blocks = kv_blocks[block_table[row]].astype(jnp.float32)  # [M, 2, K, S, H]
        if kv_scales is not None:
            blocks = blocks * kv_scales[block_table[row]][..., None]
        k, v = blocks.transpose(1, 0, 3, 2, 4).reshape(2, -1, num_kv_heads, head_dim)
        position = jnp.arange(k.shape[0])
        visible = (position <= own) & (token < cu_q_lens[num_rows])
        if sliding_window is not None:
            visible &= own - position < sliding_window
        grouped = query.astype(jnp.float32).reshape(num_kv_heads, -1, head_dim)
        scores = jnp.einsum("kgh,ckh->kgc", grouped, k, precision="highest") * scale
        scores = jnp.where(visible[None, None, :], scores, -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1, where=visible[None, None, :])
        values = jnp.where(visible[:, None, None], v, 0.0)  # 0 * NaN is NaN: mask V as well
        out = jnp.einsum("kgc,ckh->kgh", probs, values, precision="highest")
        return out.reshape(num_heads, head_dim).astype(q.dtype)

    return jax.lax.map(lambda args: attend(*args), (jnp.arange(num_tokens), q))
