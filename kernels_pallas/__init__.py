"""Attention kernels over a paged KV cache: the two operations a serving step needs.

Owns: `paged_attention` (read the cache) and `write_kv` (fill it), each a folder with a contract, a
reference that is the oracle, and one module per backend. In and out: JAX arrays only. Must not
know: requests, policies, the engine, configs. Imports jax and numpy, never paxserve.

    from kernels_pallas.paged_attention import paged_attention
    from kernels_pallas.write_kv import write_kv
    from kernels_pallas.interpret import interpreted  # a Pallas backend on a CPU

Glossary, used in every signature here: T tokens in the step (padded), R rows (padded), P blocks,
S slots per block, M blocks per row in the table, N query heads, K kv heads, G = N / K query heads
per kv head, H head dim, C context tokens handled at once.
"""
