"""Schedules as text, one line a step. `python tests/golden/schedule_text.py` prints them all, with
`--write` into `schedules/`; check by hand what changed.

A cell is a row: `R1 +4` four tokens of R1 computed, `R1 dead` finished and held, `R1 stays` running
but nothing computed, `-` empty.
"""

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parents[1])]

from builders import make_engine, make_limits, prompt_ids, submit  # noqa: E402

from paxserve.batching.chunked_prefill import ChunkedPrefill  # noqa: E402
from paxserve.batching.static import Static  # noqa: E402
from paxserve.batching.textbook import Textbook  # noqa: E402
from paxserve.engine import Engine  # noqa: E402
from paxserve.events import Kind  # noqa: E402
from paxserve.step import StepPlan  # noqa: E402

FOUR_ROWS = (
    {"max_num_seqs": 4, "max_model_len": 32, "num_blocks": 65},
    [(4, 26), (4, 10), (4, 18), (4, 7), (4, 5), (4, 3)],
)
SHORT_OF_MEMORY = (
    {"max_num_seqs": 2, "max_model_len": 8, "block_size": 2, "num_blocks": 5},
    [(3, 4), (2, 3), (2, 2)],
)
CHUNKS = (
    {"max_num_seqs": 2, "max_num_batched_tokens": 4, "block_size": 2, "num_blocks": 33},
    [(3, 3), (6, 2)],
)
SCENARIOS = {
    "four_rows-static": (Static(), *FOUR_ROWS),
    "four_rows-textbook": (Textbook(), *FOUR_ROWS),
    "four_rows-chunked_prefill": (ChunkedPrefill(), *FOUR_ROWS),
    "short_of_memory-textbook": (Textbook(), *SHORT_OF_MEMORY),
    "short_of_memory-chunked_prefill": (ChunkedPrefill(), *SHORT_OF_MEMORY),
    "chunks-chunked_prefill": (ChunkedPrefill(), *CHUNKS),
}


def run(scenario: str) -> tuple[Engine, str]:
    """Serve a scenario; the engine, and its schedule as text."""
    batching, sizes, requests = SCENARIOS[scenario]
    limits = make_limits(**sizes)
    engine = make_engine(limits, batching=batching)
    for number, (num_prompt, num_output) in enumerate(requests, start=1):
        token_ids = prompt_ids(num_prompt, number)
        submit(engine, token_ids, max_tokens=num_output, request_id=f"R{number}")
    lines = [f"{scenario}: {describe(limits, requests)}"]
    num_dead = num_idle = 0

    def note(plan: StepPlan) -> None:
        nonlocal num_dead, num_idle
        cells = row_cells(engine, plan)
        waits = [r.request_id for r in engine.scheduler.batch.waiting]
        num_dead += sum(cell.endswith("dead") for cell in cells)
        num_idle += sum(cell == "-" for cell in cells) if waits else 0
        row_text = "  ".join(f"{cell:8}" for cell in cells)
        lines.append(f"{len(lines):4}  {row_text}  waits: {' '.join(waits)}".rstrip())

    engine.executor.on_submit = note  # type: ignore[attr-defined]
    num_seen = 0
    while engine.has_work:
        num_lines = len(lines)
        engine.step()
        events = list(engine.events)[num_seen:]
        num_seen += len(events)
        if len(lines) > num_lines:
            lines[-1] += "".join(map(remark, events))
    lines.append(f"dead row-steps: {num_dead}")
    lines.append(f"empty row-steps while someone waits: {num_idle}")
    return engine, "\n".join(lines) + "\n"


def describe(limits: Any, requests: Any) -> str:
    """The first line."""
    asked = ", ".join(f"R{i} {p}+{o}" for i, (p, o) in enumerate(requests, start=1))
    return (
        f"prompt+output {asked}; {limits.max_num_seqs} rows, budget "
        f"{limits.max_num_batched_tokens}, {limits.num_usable_blocks} blocks of {limits.block_size}"
    )


def row_cells(engine: Engine, plan: StepPlan) -> list[str]:
    """What is in each row while a step runs."""
    batch = engine.scheduler.batch
    cells = ["-"] * engine.limits.max_num_seqs
    for request in batch.finished:
        cells[request.sequence.row] = f"{request.request_id} dead"
    for request in batch.running:
        cells[request.sequence.row] = f"{request.request_id} stays"
    for row in plan.rows:
        cells[row.row] = f"{batch.by_sequence[row.sequence_id][0].request_id} +{row.num_tokens}"
    return cells


def remark(event: Any) -> str:
    """What a step's line says of an event."""
    if event.kind is Kind.PREEMPTED:
        return f"  preempts {event.request_id}, {event.num_tokens} tokens lost"
    if event.kind is Kind.HELD_BACK:
        return f"  held back {event.request_id}: {event.detail}"
    return f"  ends {event.request_id}" if event.kind is Kind.FINISHED else ""


def main() -> None:
    """Print or write all schedules."""
    for scenario in SCENARIOS:
        _, text = run(scenario)
        if "--write" in sys.argv:
            (FOLDER / "schedules" / f"{scenario}.txt").write_text(text, encoding="ascii")
        print(text)


if __name__ == "__main__":
    main()
