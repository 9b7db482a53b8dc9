"""A5: what a long prompt does to those who are being answered.

Llama-3-70B on four H100, tens of streams in full flow, and a newcomer with 2,000 tokens: its prompt
in a step of its own (vLLM V0), or in chunks beside the decodes (Sarathi's budget of 512 tokens).
Source: Agrawal et al., "Sarathi-Serve", OSDI'24, sections 3.2 and 4.1.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paxserve.claims import Claim, Row, Scale
from paxserve.claims.serving import ask
from paxserve.claims.simulation import simulated_engine
from paxserve.request import Request

NUM_STREAMS, CONTEXT, PROMPT, BUDGET = 32, 1000, 2000, 512
WHOLE = ("baseline=vllm_v0",)
_WARM_STEPS, _NUM_OUTPUT = 40, 4000  # nobody ends before the newcomer

A5 = Row(
    "A5",
    "A 2,000-token prompt run as its own step freezes every active stream; chunked prefill removes "
    "the freeze and costs the newcomer a little TTFT (70B, tens of streams)",
    {
        "longest gap of a stream, in ordinary gaps, whole": "many",
        "longest gap of a stream, in ordinary gaps, chunked": "few",
        "newcomer's TTFT, ms, whole and chunked": "tens of ms apart",
    },
    "direction, order: over 3, a third of that, 10 to 100 ms",
)


class Stall(NamedTuple):
    """ordinary_s: the median gap between tokens of the streams before the newcomer came.
    longest_s: their longest since. ttft_s: of the newcomer. gaps_s: one stream's, since.
    """

    ordinary_s: float
    longest_s: float
    ttft_s: float
    gaps_s: tuple[float, ...]


def chunked(budget: int) -> tuple[str, ...]:
    """Overrides of the system that shares steps of so many tokens."""
    return ("baseline=sarathi", f"limits.max_num_batched_tokens={budget}")


def stall(
    system: Sequence[str],
    *,
    prompt: int = PROMPT,
    num_streams: int = NUM_STREAMS,
    context: int = CONTEXT,
) -> Stall:
    """One newcomer among streams.

    Args:
        system: overrides.
        prompt: tokens of the newcomer.
        num_streams: how many are being answered.
        context: tokens of each stream's prompt.
    """
    engine = simulated_engine(["experiment=prefill_stall", *system])
    streams = [ask(engine, context, _NUM_OUTPUT) for _ in range(num_streams)]
    while not all(stream.num_output_tokens for stream in streams):
        engine.step()
    flowing_s = engine.clock.now_s()
    for _ in range(_WARM_STEPS):
        engine.step()
    since_s = engine.clock.now_s()
    newcomer = ask(engine, prompt, 2)
    while newcomer.finish_reason is None:
        engine.step()
    ordinary = [gap for stream in streams for gap in _gaps(stream, flowing_s, since_s)]
    after = [_gaps(stream, since_s) for stream in streams]
    return Stall(
        ordinary_s=float(np.median(ordinary)),
        longest_s=max(map(max, after)),
        ttft_s=newcomer.sequence.token_times_s[0] - newcomer.arrival_s,
        gaps_s=tuple(after[0]),
    )


def prefill_stall(scale: Scale) -> Iterator[Claim]:
    """A5: one newcomer, twice."""
    whole, mixed = stall(WHOLE), stall(chunked(BUDGET))
    freeze, left = (each.longest_s / each.ordinary_s for each in (whole, mixed))
    later_ms = 1000 * (mixed.ttft_s - whole.ttft_s)
    yield A5.measured(
        {
            "longest gap of a stream, in ordinary gaps, whole": round(freeze, 1),
            "longest gap of a stream, in ordinary gaps, chunked": round(left, 1),
            "newcomer's TTFT, ms, whole and chunked": [
                round(1000 * whole.ttft_s),
                round(1000 * mixed.ttft_s),
            ],
        },
        holds=freeze > 3 and left < freeze / 3 and 10 <= later_ms <= 100,
        note=f"{NUM_STREAMS} streams of {CONTEXT} tokens, an ordinary gap of "
        f"{1000 * whole.ordinary_s:.1f} ms; the freeze is {1000 * whole.longest_s:.0f} ms, steps "
        f"of {BUDGET} tokens make gaps of {1000 * mixed.longest_s:.0f} ms at most",
    )


def _gaps(request: Request, start_s: float, end_s: float = float("inf")) -> list[float]:
    """Between tokens of which the later one came in (start, end]."""
    times = request.sequence.token_times_s
    gaps = zip(times, np.diff(times).tolist(), strict=False)
    return [gap for before_s, gap in gaps if start_s < before_s + gap <= end_s]
