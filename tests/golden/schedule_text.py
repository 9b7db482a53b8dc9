"""Schedules as text, one line a step. `python tests/golden/schedule_text.py` prints them all, with
`--write` into `schedules/`; check by hand what changed.

A cell is a row: `R1 +4` four tokens of R1 computed, `R1 dead` finished and held, `R1 stays` running
but nothing computed, `-` empty.
"""

import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parents[1])]

from baselines.composed import baseline_policies  # noqa: E402
from builders import make_engine, make_limits, prompt_ids, submit  # noqa: E402

from paxserve.batching.chunked_prefill import ChunkedPrefill  # noqa: E402
from paxserve.batching.static import Static  # noqa: E402
from paxserve.batching.textbook import Textbook  # noqa: E402
from paxserve.engine import Engine  # noqa: E402
from paxserve.events import UNASKED, Kind  # noqa: E402
from paxserve.request import Origin  # noqa: E402
from paxserve.step import StepPlan  # noqa: E402


class Ask(NamedTuple):
    """A request: prompt and output tokens. It arrives before the step after `at`; its first
    `num_common` prompt tokens are those of all others.
    """

    prompt: int
    output: int
    at: int = 0
    client: str = ""
    num_common: int = 0

    def token_ids(self, number: int) -> list[int]:
        own = prompt_ids(self.prompt, number)
        return prompt_ids(self.num_common) + own[self.num_common :]

    def __str__(self) -> str:
        parts = [f"{self.prompt}+{self.output}"]
        parts += [f"at {self.at}"] if self.at else []
        parts += [f"of {self.client}"] if self.client else []
        parts += [f"({self.num_common} common)"] if self.num_common else []
        return " ".join(parts)


class Scenario(NamedTuple):
    """`note` says what to look at; `baseline` names the config whose policies run."""

    sizes: dict[str, int]
    asks: list[Ask]
    policies: dict[str, Any] = {}  # noqa: RUF012
    note: str = ""
    baseline: str = ""
    settings: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    def chosen(self) -> dict[str, Any]:
        if self.baseline:
            return baseline_policies(self.baseline, self.settings)
        return self.policies


FOUR_ROWS = (
    {"max_num_seqs": 4, "max_model_len": 32, "num_blocks": 65},
    [Ask(4, 26), Ask(4, 10), Ask(4, 18), Ask(4, 7), Ask(4, 5), Ask(4, 3)],
)
SHORT_OF_MEMORY = (
    {"max_num_seqs": 2, "max_model_len": 8, "block_size": 2, "num_blocks": 5},
    [Ask(3, 4), Ask(2, 3), Ask(2, 2)],
)
CHUNKS = (
    {"max_num_seqs": 2, "max_num_batched_tokens": 4, "block_size": 2, "num_blocks": 33},
    [Ask(3, 3), Ask(6, 2)],
)
CONTIGUOUS = {"max_num_seqs": 4, "max_model_len": 8, "block_size": 1, "num_blocks": 17}
FOR_ORCA = [Ask(3, 5), Ask(2, 3), Ask(2, 2), Ask(1, 2)]
# R1 decodes when R2 comes with a long prompt; then memory runs short.
LATE_PROMPT = [Ask(3, 7), Ask(9, 4, at=2), Ask(2, 2, at=3)]
LATE_SIZES = {"max_num_seqs": 3, "max_model_len": 16, "block_size": 2}
BASELINES = {
    "static": Scenario(
        CONTIGUOUS,
        [Ask(3, 5), Ask(2, 2), Ask(2, 3)],
        note="16 slots hold two requests of the maximum length 8, so R3 waits though two rows "
        "are empty; R2 ends after 2 steps and stays, dead, until R1 has ended too.",
    ),
    "orca_max": Scenario(
        CONTIGUOUS,
        FOR_ORCA,
        note="Each reserves 8 of 16 slots: two at a time. R3 has R2's run in the step after R2's "
        "end, with its whole prompt beside R1's decode.",
    ),
    "orca_pow2": Scenario(
        CONTIGUOUS,
        FOR_ORCA,
        note="R1 reserves 3 + 8, cut to 8; R2 2 + 4, in a run of 8; R3 2 + 2 and R4 1 + 2, in "
        "runs of 4 that only R2's end makes: both enter in step 4.",
    ),
    "orca_oracle": Scenario(
        CONTIGUOUS,
        FOR_ORCA,
        note="R1 reserves 7 in a run of 8, R2 4 in 4, R3 3 in 4: full at once. R4 (2 slots) "
        "enters when R3 ends.",
    ),
    "vllm_v0": Scenario(
        LATE_SIZES | {"num_blocks": 9},
        LATE_PROMPT,
        note="Prompts before decodes: R1 stays while R2 and then R3 go in whole. In step 5 the 8 "
        "blocks are not enough: the newest, R3, makes way, in step 6 R2. What they had "
        "computed is lost, their tokens are not: step 10 computes R2's 9 + 2 as one prompt.",
    ),
    "sarathi": Scenario(
        LATE_SIZES | {"num_blocks": 14, "max_num_batched_tokens": 4},
        LATE_PROMPT,
        note="R1 decodes in every step; R2's prompt takes what is left of the 4 tokens, 3 a "
        "step. The memory of all of it is taken with the first chunk. R3 enters behind its "
        "last one.",
    ),
    "simple_chunking": Scenario(
        LATE_SIZES | {"num_blocks": 14, "max_num_batched_tokens": 4},
        LATE_PROMPT,
        note="A step of prompt chunks, then one of decodes: R1 decodes every second step while "
        "R2's prompt goes in by 4. R3 enters only when no prompt is under way.",
    ),
    "vllm_v1": Scenario(
        LATE_SIZES | {"num_blocks": 9, "max_num_batched_tokens": 10},
        [Ask(5, 5, num_common=4), Ask(5, 6, num_common=4), Ask(6, 4, at=1), Ask(4, 3, 2, "", 4)],
        note="R2 finds 4 tokens that R1 computes in the same step. When memory is short the last "
        "of running is preempted, and nobody enters in that step. A hit leaves the last "
        "prompt token: R4, all of whose 4 tokens are cached, computes 2.",
    ),
    "sglang_lpm": Scenario(
        {"max_num_seqs": 4, "max_model_len": 16, "block_size": 1, "num_blocks": 41},
        [Ask(6, 3, num_common=5), Ask(4, 2, at=1), Ask(7, 2, 1, "", 6), Ask(7, 3, 1, "", 6)],
        settings={"longest_prefix_hit": {"reorders_at_most": 128, "shared_tokens": 0}},
        note="R3 finds 5 tokens of R1 and goes before R2, which came first. R4 finds them too, "
        "but shares one more with R3: it waits a step and finds 6.",
    ),
    "fastserve": Scenario(
        {"max_num_seqs": 1, "max_model_len": 16, "block_size": 2, "num_blocks": 17},
        [Ask(2, 7), Ask(2, 2, at=3), Ask(8, 2, at=3)],
        settings={
            "mlfq": {
                "first_quantum_s": 1.5,
                "num_levels": 4,
                "prefill_s_per_token": 0.5,
                "starvation_s": 50.0,
            }
        },
        note="Levels of 1.5, 3, 6 s. R1 falls to level 1 after 2 steps; R2, new at level 0, "
        "takes its row. R3's prompt of 4 s skips to level 2, behind R1. R1 comes back "
        "without recomputing.",
    ),
    "vtc": Scenario(
        {"max_num_seqs": 1, "max_model_len": 16, "block_size": 2, "num_blocks": 17},
        [
            Ask(4, 2, client="a"),
            Ask(4, 2, client="a"),
            Ask(2, 2, client="b"),
            Ask(2, 2, client="b"),
        ],
        note="a is charged 4 + 2 x 2 = 8 for R1, so b's R3 (2 + 4 = 6) and R4 (12) go before R2.",
    ),
    "sjf": Scenario(
        {"max_num_seqs": 2, "max_model_len": 16, "block_size": 2, "num_blocks": 17},
        [Ask(3, 5), Ask(3, 4), Ask(3, 2), Ask(3, 1, at=1)],
        note="Shortest output first: R3 and R2, then R4, which came later than R1 and is shorter.",
    ),
    "srpt": Scenario(
        {"max_num_seqs": 1, "max_model_len": 16, "block_size": 2, "num_blocks": 17},
        [Ask(3, 6), Ask(3, 2, at=2), Ask(3, 3, at=5)],
        note="R2 (2 to come) takes R1's row (4 to come); R1 computes its tokens again. Then R3 "
        "(3) does not displace R1 (3 to come): not less.",
    ),
    "past_future": Scenario(
        {"max_num_seqs": 3, "max_model_len": 16, "block_size": 1, "num_blocks": 17},
        [Ask(4, 2), Ask(4, 8, at=2), Ask(6, 2, at=2), Ask(6, 2, at=2)],
        note="16 slots. R1 ended with 2 outputs, so R2 (4 + 2) and R3 (6 + 2) are expected to "
        "fit. R4's prompt would fit the 6 slots left, but its future (6 + 2) does not: it "
        "enters when R3 has ended.",
    ),
}
SCENARIOS = {
    "four_rows-static": Scenario(*FOUR_ROWS, {"batching": Static()}),
    "four_rows-textbook": Scenario(*FOUR_ROWS, {"batching": Textbook()}),
    "four_rows-chunked_prefill": Scenario(*FOUR_ROWS, {"batching": ChunkedPrefill()}),
    "short_of_memory-textbook": Scenario(*SHORT_OF_MEMORY, {"batching": Textbook()}),
    "short_of_memory-chunked_prefill": Scenario(*SHORT_OF_MEMORY, {"batching": ChunkedPrefill()}),
    "chunks-chunked_prefill": Scenario(*CHUNKS, {"batching": ChunkedPrefill()}),
} | {f"baseline-{name}": s._replace(baseline=name) for name, s in BASELINES.items()}


def run(name: str) -> tuple[Engine, str]:
    """Serve a scenario; the engine, and its schedule as text."""
    scenario = SCENARIOS[name]
    policies = scenario.chosen()
    swaps = "preemption" in policies and policies["preemption"].swaps
    host = {"num_host_blocks": 64} if swaps else {}
    limits = make_limits(**scenario.sizes, **host)
    engine = make_engine(limits, **policies)
    notes = [f"# {line}" for line in wrap(scenario.note, 90)]
    lines = [f"{name}: {describe(limits, scenario.asks)}"]
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
    coming = list(enumerate(scenario.asks, start=1))
    while coming or engine.has_work:
        while coming and coming[0][1].at <= engine.clock.now_s():
            enter(engine, *coming.pop(0))
        num_lines = len(lines)
        engine.step()
        events = list(engine.events)[num_seen:]
        num_seen += len(events)
        if len(lines) > num_lines:
            lines[-1] += "".join(map(remark, events))
    lines.append(f"dead row-steps: {num_dead}")
    lines.append(f"empty row-steps while someone waits: {num_idle}")
    return engine, "\n".join(notes + lines) + "\n"


def enter(engine: Engine, number: int, ask: Ask) -> None:
    """The request as the engine takes it."""
    submit(
        engine,
        ask.token_ids(number),
        max_tokens=ask.output,
        request_id=f"R{number}",
        origin=Origin(
            client=ask.client,
            num_true_output_tokens=ask.output,
            num_declared_output_tokens=ask.output,
        ),
    )


def describe(limits: Any, asks: list[Ask]) -> str:
    """The first line."""
    asked = ", ".join(f"R{i} {ask}" for i, ask in enumerate(asks, start=1))
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
    if event.kind is Kind.ENTERED and event.detail:
        return f"  {event.request_id}: {event.detail}"
    if event.kind is Kind.HELD_BACK and event.detail == UNASKED:
        return ""
    if event.kind is Kind.HELD_BACK:
        # A gate's own words are not the schedule's.
        return f"  held back {event.request_id}: {': '.join(event.detail.split(': ')[:2])}"
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
