"""B4: contiguous memory wears out under churn, and a restart cures it until it wears out again.

A server is started, serves a queue that never empties, and is restarted with what is left of it,
several times over. Reservation (the true lengths) and requests are the same for both placements.
Prompts are of any length up to 1,000, outputs short and independent of them, so that the mix of
requests that run does not drift with time by itself. Source: Kwon et al., SOSP'23, section 3.1.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paxserve.claims import Claim, Row, Scale, within
from paxserve.claims.constant import Constant
from paxserve.claims.serving import ask, make_engine, make_limits, policies
from paxserve.draws import Stream, stream
from paxserve.engine import Engine
from paxserve.workload.lengths import Length

NUM_SLOTS = 15_728
NUM_STEPS = 400  # of a life
STAGES = ((0, 20), (20, 60), (60, 150), (150, NUM_STEPS))  # steps since the start
_QUEUE = 400  # requests that a life may see; it ends long before it has served them
_SEED = 4

B4 = Row(
    "B4",
    "Under churn contiguous memory fragments the longer the server runs, throughput degrades "
    "quietly, and a restart cures it; paged memory stays as it is",
    {
        "contiguous, running requests": "falls with age",
        "contiguous, share of slots in use, %": "falls with age",
        "after a restart": "as at the start",
        "paged, running requests": "flat",
    },
    "direction; flat: within 10 %",
)


class Stage(NamedTuple):
    """Means over the steps of one stage of a server's life."""

    num_running: float
    output_tokens_per_s: float
    used_share: float
    num_free: float
    largest_free_run: float


def churn(scale: Scale) -> Iterator[Claim]:
    """B4."""
    num_lives = scale.of(12, 5)
    contiguous, paged = lives("first_fit", num_lives), lives("paged", num_lives)
    aging, flat = by_stage(contiguous), by_stage(paged)
    first, later = contiguous[0][0], by_stage(contiguous[1:])[0]
    shares = [stage.used_share for stage in aging]
    wears = shares == sorted(shares, reverse=True) and shares[-1] < 0.95 * shares[0]
    slows = aging[-1].num_running < 0.95 * aging[0].num_running
    cured = within(later.used_share, first.used_share, share=0.03)
    stays = all(within(stage.num_running, flat[0].num_running, share=0.1) for stage in flat)
    yield B4.measured(
        {
            "steps since the start, up to": [end for _, end in STAGES],
            "contiguous, running requests": _rounded(aging, "num_running"),
            "contiguous, output tokens/s": _rounded(aging, "output_tokens_per_s"),
            "contiguous, share of slots in use, %": _rounded(aging, "used_share", 100),
            "contiguous, free slots": _rounded(aging, "num_free"),
            "contiguous, largest free run": _rounded(aging, "largest_free_run"),
            "after a restart": f"{100 * later.used_share:.1f} % in use, at first "
            f"{100 * first.used_share:.1f} %",
            "paged, running requests": _rounded(flat, "num_running"),
            "paged, share of slots in use, %": _rounded(flat, "used_share", 100),
        },
        holds=wears and slows and cured and stays,
        note=f"means over {num_lives} lives of {NUM_STEPS} steps of one second; the wear is "
        "complete after two or three lifetimes of a request and then stays",
    )


def _lengths(num_requests: int) -> list[Length]:
    rng = stream(_SEED, Stream.LENGTHS)
    prompts = rng.integers(16, 1000, num_requests)
    outputs = rng.integers(20, 180, num_requests)
    return [Length(*pair) for pair in zip(prompts.tolist(), outputs.tolist(), strict=True)]


def lives(
    placement: str, num_lives: int, *, stages: Sequence[tuple[int, int]] = STAGES
) -> list[list[Stage]]:
    """One list of stages per life; who has not ended begins again in the next.

    Args:
        placement: first_fit or paged.
        num_lives: how often the server is started.
        stages: first and last step of each.
    """
    limits = make_limits(
        max_num_seqs=256, max_num_batched_tokens=16_384, block_size=1, num_blocks=NUM_SLOTS + 1
    )
    chosen = policies(reservation="oracle", placement=placement)
    lived, left = [], _lengths((num_lives + 1) * _QUEUE)
    for _ in range(num_lives):
        engine = make_engine(limits, chosen, executor=Constant())
        for length in left[:_QUEUE]:
            ask(engine, length.num_prompt_tokens, length.num_output_tokens)
        for _ in range(NUM_STEPS):
            engine.step()
        ended = [request.finish_reason is not None for request in engine.requests]
        left = [own for own, is_over in zip(left, ended, strict=False) if not is_over] + left[
            len(ended) :
        ]
        lived.append([_stage(engine, *steps) for steps in stages])
    return lived


def _stage(engine: Engine, start: int, end: int) -> Stage:
    records, counts = engine.steps[start:end], engine.ledger.steps()[start:end]
    if not all(record.num_waiting for record in records):
        raise RuntimeError(f"the queue ran empty before step {end}: it must be longer")
    return Stage(
        num_running=float(np.mean([record.num_running for record in records])),
        output_tokens_per_s=sum(record.num_rows for record in records) / (end - start),
        used_share=float(np.mean([slots.live + slots.reserved_used for slots in counts]))
        / NUM_SLOTS,
        num_free=float(np.mean([slots.free + slots.free_unfit for slots in counts])),
        largest_free_run=float(np.mean([record.largest_free_run for record in records])),
    )


def by_stage(lived: Sequence[Sequence[Stage]]) -> list[Stage]:
    """Means over lives."""
    return [Stage(*np.mean(stages, axis=0).tolist()) for stages in zip(*lived, strict=True)]


def _rounded(stages: Sequence[Stage], field: str, factor: float = 1) -> list[float]:
    return [round(factor * getattr(stage, field), 1) for stage in stages]
