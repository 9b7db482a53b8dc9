"""A7: how many floating point operations a decode step does per byte that it reads.

The step is one that an engine planned; its work is counted as a simulated step's is
(`step_work.py`). Source: Williams
et al., "Roofline", CACM 2009; Pope et al., "Efficiently scaling transformer inference", 2022.
"""

from collections.abc import Iterator

from paxserve.claims import Claim, Row, Scale, within
from paxserve.claims.constant import Constant
from paxserve.claims.serving import ask, make_engine, make_limits, policies, watch
from paxserve.models.config import ModelConfig
from paxserve.models.dimensions import Dimensions
from paxserve.models.llama3 import LLAMA_3_70B
from paxserve.step import StepPlan
from paxserve.step_shape import shape_of
from paxserve.step_work import WorkCounter

A100_FLOP_PER_S = 312e12
A100_BYTES_PER_S = 2.0e12
_CLOSE, _FAR = 1 / 2, 1 / 10  # shares of the ridge

A7 = Row(
    "A7",
    "Decode's arithmetic intensity is about the batch size: on an A100 112 rows come close to the "
    "ridge, 14 stay far from it (Llama-3-70B, short contexts)",
    {"FLOP/byte, 112 rows": 112, "FLOP/byte, 14 rows": 14, "FLOP/byte, the ridge": 150},
    "10 %; close: over 1/2 of the ridge, far: under 1/10",
)


def intensity(scale: Scale) -> Iterator[Claim]:
    """A7."""
    ridge = A100_FLOP_PER_S / A100_BYTES_PER_S
    found = {rows: flop_per_byte(LLAMA_3_70B, decode_step(rows, context=32)) for rows in (112, 14)}
    long = {rows: flop_per_byte(LLAMA_3_70B, decode_step(rows, context=4096)) for rows in (112, 14)}
    is_near = all(within(found[rows], rows, share=0.1) for rows in found)
    yield A7.measured(
        {
            "FLOP/byte, 112 rows": round(found[112], 1),
            "FLOP/byte, 14 rows": round(found[14], 1),
            "FLOP/byte, the ridge": round(ridge, 1),
        },
        holds=is_near
        and within(ridge, 150, share=0.1)
        and found[112] > _CLOSE * ridge
        and found[14] < _FAR * ridge,
        note=f"true of the weights: with 4,096 tokens of context a row, whose KV is read for one "
        f"row each, {long[112]:.1f} and {long[14]:.1f}",
    )


def decode_step(num_rows: int, *, context: int) -> StepPlan:
    """The first step in which so many requests with prompts of `context` tokens all decode."""
    limits = make_limits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows * context,
        max_model_len=context + 8,
        num_blocks=num_rows * (context // 16 + 1) + 1,
    )
    engine = make_engine(limits, policies(), executor=Constant())
    plans: list[StepPlan] = []
    watch(engine, plans.append)
    for _ in range(num_rows):
        ask(engine, context, 2)
    while engine.has_work:
        engine.step()
    return plans[1]


def flop_per_byte(config: ModelConfig, plan: StepPlan) -> float:
    """Of all parts of the step on one device; weights are read once a step, KV once a row."""
    work = WorkCounter.of(Dimensions.of(config, dtype="bfloat16")).of_step(shape_of(plan))
    return work.flop / work.num_bytes
