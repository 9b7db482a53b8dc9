"""A1-A4: what a batch is, and when one may join it.

Six requests and four rows. Every prompt is computed in a request's first step, which also samples,
so a request of k tokens needs k steps. Source: Orca (OSDI'22), sections 2 and 3.1.
"""

from collections.abc import Iterator

from paxserve.claims import Claim, Row, Scale
from paxserve.claims.serving import ask, make_engine, make_limits, policies, steps_of, watch
from paxserve.engine import Engine
from paxserve.events import Event, Kind
from paxserve.step import StepPlan

NUM_STEPS = {"R1": 26, "R2": 10, "R3": 15, "R4": 7, "R5": 5, "R6": 5}
_NUM_ROWS = 4

A1 = Row(
    "A1",
    "Static batching: membership is fixed at formation and dissolves as a unit",
    {
        "R5, R6 enter in step": [27, 27],
        "R4, R2 end in step": [7, 10],
        "steps in which R4's, R2's row is dead and holds cache": [19, 16],
        "dead row-steps of the batch (R3 needs 15)": 16 + 11 + 19,
    },
)
A2 = Row(
    "A2",
    "Continuous batching: a row is taken at the boundary of the step in which its holder ends",
    {
        "R5, R6 enter in step": [8, 11],
        "R5, R6 take the row of": "R4, R2",
        "idle row-steps while someone waits": 0,
        "dead row-steps": 0,
    },
)
A3 = Row(
    "A3",
    "Head-of-line blocking: static batching's longest member sets the TTFT of all who queue, under "
    "continuous batching the first vacancy does (steps, R1 to R6)",
    {"static": [1, 1, 1, 1, 27, 27], "continuous": [1, 1, 1, 1, 8, 11]},
)
A4 = Row(
    "A4",
    "The textbook loop: retire, admit, preempt the newest when one cannot grow (to the front of "
    "the queue, its tokens recomputed), one forward pass, append",
    {
        "step 1": "R1+3 R2+2; waits R3 R4",
        "step 2": "R1+1 R2+1; waits R3 R4; ends R1",
        "step 3": "R2+1 R3+3; waits R4",
        "step 4": "R2+1; waits R3 R4; preempts R3",
        "step 5": "R2+1; waits R3 R4",
        "step 6": "R2+1; waits R3 R4; ends R2",
        "step 7": "R3+4 R4+2",
        "step 8": "R3+1; waits R4; preempts R4",
        "step 9": "R3+1; waits R4; ends R3",
        "step 10": "R4+3; ends R4",
    },
)


def head_of_line(scale: Scale) -> Iterator[Claim]:
    """A1 to A3: the same six requests, once with each batching."""
    static = _serve_six("static")
    continuous = _serve_six("textbook")
    yield A1.measured(
        {
            "R5, R6 enter in step": [_step(static, Kind.ENTERED, name) for name in ("R5", "R6")],
            "R4, R2 end in step": [_step(static, Kind.FINISHED, name) for name in ("R4", "R2")],
            "steps in which R4's, R2's row is dead and holds cache": [
                _num_dead_steps(static, name) for name in ("R4", "R2")
            ],
            "dead row-steps of the batch (R3 needs 15)": sum(
                record.num_held
                for record in static.steps
                if record.step_id <= max(NUM_STEPS[name] for name in ("R1", "R2", "R3", "R4"))
            ),
        },
        note=f"the dead hold {_most_held(static)} slots at most",
    )
    yield A2.measured(
        {
            "R5, R6 enter in step": [
                _step(continuous, Kind.ENTERED, name) for name in ("R5", "R6")
            ],
            "R5, R6 take the row of": ", ".join(
                _held_before(continuous, name) for name in ("R5", "R6")
            ),
            "idle row-steps while someone waits": sum(
                _NUM_ROWS - record.num_rows for record in continuous.steps if record.num_waiting
            ),
            "dead row-steps": sum(record.num_held for record in continuous.steps),
        }
    )
    yield A3.measured({"static": _ttfts(static), "continuous": _ttfts(continuous)})


def textbook(scale: Scale) -> Iterator[Claim]:
    """A4: two rows and four blocks of two slots, so that R2's growth costs R3 its memory, and later
    R3's costs R4. Worked out by hand: R1 has 3 prompt and 2 output tokens, R2 2 and 6, R3 3 and 4,
    R4 2 and 2.
    """
    limits = make_limits(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=8, block_size=2, num_blocks=5
    )
    engine = make_engine(limits, policies(batching="textbook"))
    lines: dict[str, list[str]] = {}

    def see(plan: StepPlan) -> None:
        holders = engine.scheduler.batch.by_sequence
        rows = [(holders[row.sequence_id][0].request_id, row.num_tokens) for row in plan.rows]
        waiting = [request.request_id for request in engine.scheduler.batch.waiting]
        line = [" ".join(f"{name}+{num_tokens}" for name, num_tokens in sorted(rows))]
        line += [f"waits {' '.join(waiting)}"] if waiting else []
        lines[f"step {plan.step_id}"] = line

    watch(engine, see)
    for name, num_prompt, num_output in (("R1", 3, 2), ("R2", 2, 6), ("R3", 3, 4), ("R4", 2, 2)):
        ask(engine, num_prompt, num_output, name=name)
    for _ in steps_of(engine):
        pass
    for kind, word in ((Kind.PREEMPTED, "preempts"), (Kind.FINISHED, "ends")):
        for event in _events(engine, kind):
            lines[f"step {event.step_id}"].append(f"{word} {event.request_id}")
    yield A4.measured({step: "; ".join(line) for step, line in lines.items()})


def _serve_six(batching: str) -> Engine:
    limits = make_limits(
        max_num_seqs=_NUM_ROWS, max_num_batched_tokens=64, max_model_len=64, num_blocks=17
    )
    engine = make_engine(limits, policies(batching=batching))
    for name, num_steps in NUM_STEPS.items():
        ask(engine, 4, num_steps, name=name)
    for _ in steps_of(engine):
        pass
    return engine


def _events(engine: Engine, kind: Kind) -> list[Event]:
    return [event for event in engine.events if event.kind is kind]


def _step(engine: Engine, kind: Kind, name: str) -> int:
    (event,) = [event for event in _events(engine, kind) if event.request_id == name]
    return event.step_id


def _num_dead_steps(engine: Engine, name: str) -> int:
    """Steps after its end in which a request's memory was held; the ledger must have seen it."""
    end, release = _step(engine, Kind.FINISHED, name), _step(engine, Kind.RELEASED, name)
    slots = engine.ledger.steps()
    return sum(
        end < record.step_id <= release and held.held > 0
        for record, held in zip(engine.steps, slots, strict=True)
    )


def _most_held(engine: Engine) -> int:
    return max(counts.held for counts in engine.ledger.steps())


def _held_before(engine: Engine, name: str) -> str:
    """Who had a request's row last before it."""
    (own,) = [event for event in _events(engine, Kind.ENTERED) if event.request_id == name]
    before = [
        event
        for event in _events(engine, Kind.ENTERED)
        if event.row == own.row and event.step_id < own.step_id
    ]
    return before[-1].request_id


def _ttfts(engine: Engine) -> list[int]:
    first_times = [request.sequence.token_times_s[0] for request in engine.requests]
    return [round(time_s) for time_s in first_times]
