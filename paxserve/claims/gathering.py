"""E1: what gathering through the block table costs the attention kernel.

Measured on JAX, on the CPU: `python -m experiments.bench paging` prints the same at a larger size,
`python -m kernels_pallas.bench` on an accelerator. Source: Kwon et al., SOSP'23, Figure 18a.
"""

import statistics
from collections.abc import Iterator

from paxserve.claims import Claim, Row, Scale

E1 = Row(
    "E1",
    "Gathering through the table costs a few percent on the attention kernel (19-26 % at batch 32 "
    "for vLLM's first): time over that with one block per row",
    {"blocks of 16": "1.19 to 1.26 on the paper's GPU", "blocks of 128": "less"},
    "as measured; direction",
)
_NOISE = 1.05


def gathering(scale: Scale) -> Iterator[Claim]:
    """E1: the same decodes, in turns."""
    from kernels_pallas.gathering import BASE, timed_gathering  # imports jax

    num_rows, context = scale.of(32, 8), scale.of(1024, 256)
    seconds = timed_gathering(num_rows=num_rows, context=context, num_rounds=scale.of(31, 15))
    ratios = {
        name: statistics.median(a / b for a, b in zip(rounds, seconds[BASE], strict=True))
        for name, rounds in seconds.items()
        if name != BASE
    }
    yield E1.measured(
        {name: round(ratio, 2) for name, ratio in ratios.items()},
        holds=_NOISE * ratios["blocks of 16"] > max(1.0, ratios["blocks of 128"]),
        note=f"wall time on this CPU, {num_rows} decodes of {context} tokens, SmolLM2's heads, "
        "medians of rounds; holds: smaller blocks cost more. No GPU was measured",
    )
