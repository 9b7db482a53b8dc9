"""B1-B3, B9: what contiguous reservations waste, and what blocks do not.

Source: Kwon et al., SOSP'23, sections 3.1, 4.2 and 4.3. A request of p prompt and o output tokens
holds p + o - 1 slots at its end. Contiguous runs are laid out in blocks of one slot.
"""

from collections.abc import Iterator
from typing import NamedTuple

from paxserve.claims import Claim, Row, Scale
from paxserve.claims.constant import Constant
from paxserve.claims.serving import (
    ask,
    make_engine,
    make_limits,
    policies,
    run_to_end,
    steps_of,
)
from paxserve.engine import Engine
from paxserve.events import Kind
from paxserve.ledger import SlotCounts
from paxserve.request import State

_300 = (200, 101)  # prompt and output tokens of 300 slots

B1 = Row(
    "B1",
    "Contiguous reservation of 2,048 slots, 300 used",
    {"slots held unused": 1748, "share of the reservation, %": 85.4},
)
B2 = Row(
    "B2",
    "Paged in blocks of 16, the same 300",
    {"slots": 304, "wasted": 4, "share of the slots, %": 1.3, "most ever wasted": 15},
)
B3 = Row(
    "B3",
    "External fragmentation: 1,700 slots are free, a request needs 1,200 contiguous",
    {
        "free slots": 1700,
        "gaps": [600, 550, 300, 250],
        "free slots of no use to it": 1700,
        "contiguous": "held back: blocks",
        "paged": "served",
    },
)
B9 = Row(
    "B9",
    "Growth on demand: a new block only when the last one is full",
    {"steps with other than ceil(tokens / 16) blocks": 0},
)


class _Arrival(NamedTuple):
    """What a request finds: the gaps, free slots in no gap long enough, and what becomes of it."""

    gaps: list[int]
    num_unfit: int
    outcome: str


def one_request(scale: Scale) -> Iterator[Claim]:
    """B1 and B2: one request, at its last step and on its way there."""
    limits = make_limits(max_num_seqs=1, block_size=1, num_blocks=2049)
    engine = make_engine(limits, policies(reservation="max", placement="first_fit"))
    last = _serve_300(engine)[-1]
    held = last.live + last.reserved_used + last.reserved_unused
    yield B1.measured(
        {
            "slots held unused": last.reserved_unused,
            "share of the reservation, %": _percent(last.reserved_unused, held),
        }
    )
    counts = _serve_300(make_engine(make_limits(max_num_seqs=1), policies()))
    last = counts[-1]
    held = last.live + last.tail
    yield B2.measured(
        {
            "slots": held,
            "wasted": last.tail,
            "share of the slots, %": _percent(last.tail, held),
            "most ever wasted": max(step.tail for step in counts),
        }
    )


def fragmentation(scale: Scale) -> Iterator[Claim]:
    """B3: ten requests lie side by side, every other one ends, and one more arrives."""
    found = {placement: _with_gaps(placement) for placement in ("first_fit", "paged")}
    contiguous, paged = found["first_fit"], found["paged"]
    yield B3.measured(
        {
            "free slots": sum(contiguous.gaps),
            "gaps": contiguous.gaps,
            "free slots of no use to it": contiguous.num_unfit,
            "contiguous": contiguous.outcome,
            "paged": paged.outcome if paged.gaps == contiguous.gaps else f"gaps {paged.gaps}",
        }
    )


def growth(scale: Scale) -> Iterator[Claim]:
    """B9: prompts and outputs of many lengths, looked at after every step."""
    engine = make_engine(make_limits(max_num_batched_tokens=2048), policies())
    for number in range(scale.of(400, 100)):
        ask(engine, 1 + 37 * number % 91, 1 + 53 * number % 120)
    num_seen = num_wrong = 0
    for _ in steps_of(engine):
        for request in engine.scheduler.batch.running:
            sequence = request.sequence
            num_seen += 1
            num_wrong += len(sequence.block_table) != -(-sequence.num_computed_tokens // 16)
    yield B9.measured(
        {"steps with other than ceil(tokens / 16) blocks": num_wrong},
        holds=num_wrong == 0 and num_seen > 0,
        note=f"{num_seen} steps of {len(engine.requests)} sequences",
    )


def _serve_300(engine: Engine) -> list[SlotCounts]:
    ask(engine, *_300)
    run_to_end(engine)
    return engine.ledger.steps()


def _with_gaps(placement: str) -> "_Arrival":
    ending, staying = (600, 550, 300, 250), (900, 800, 700, 650)
    num_slots = sum(ending) + sum(staying)
    limits = make_limits(
        max_num_seqs=16, max_num_batched_tokens=8192, block_size=1, num_blocks=num_slots + 1
    )
    chosen = policies(reservation="oracle", placement=placement)
    engine = make_engine(limits, chosen, executor=Constant())
    for short, long in zip(ending, staying, strict=True):
        ask(engine, short - 1, 2)
        ask(engine, long - 99, 100)
    for _ in range(2):
        engine.step()
    gaps = _gaps(engine)
    late = ask(engine, 1150, 51)
    engine.step()
    num_unfit = engine.ledger.steps()[-1].free_unfit
    if late.state is State.RUNNING:
        return _Arrival(gaps, num_unfit, "served")
    refused = [event for event in engine.events if event.kind is Kind.HELD_BACK]
    return _Arrival(gaps, num_unfit, f"held back: {refused[-1].detail}")


def _gaps(engine: Engine) -> list[int]:
    """Lengths of the runs of slots that no table holds, in order of address."""
    running = engine.scheduler.batch.running
    taken = {b for request in running for b in request.sequence.block_table}
    gaps = [0]
    for slot in range(1, engine.limits.num_blocks):
        if slot in taken:
            gaps.append(0)
        else:
            gaps[-1] += 1
    return [gap for gap in gaps if gap]


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1)
