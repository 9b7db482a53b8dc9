"""Runs of small scripted engines, saved and read back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit

from paxserve.engine import Engine
from paxserve.experiment import Run
from paxserve.metrics import summarize
from paxserve.report.run_tables import RunTables
from paxserve.results import write_results

CHOICES = {
    "admission": "fcfs",
    "batching": "chunked_prefill",
    "reservation": "on_demand",
    "placement": "paged",
    "victim": "newest",
    "preemption": "recompute",
}


def save(engine: Engine, path: Path, **choices: str) -> RunTables:
    """Write an engine's results, as a run of these choices, and read them."""
    path.mkdir(parents=True)
    run = Run(
        engine=engine,
        refused=[],
        summary=summarize(engine.requests, engine.steps, engine.ledger.steps()),
        warm_up_s=0.0,
        num_executables=0,
        device=None,
    )
    write_results(run, path, config={"choices": CHOICES | choices})
    return RunTables.read(path)


def serve(
    path: Path,
    lengths: Sequence[int],
    *,
    num_prompt_tokens: int = 3,
    arrivals: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None,
    choices: Mapping[str, str] | None = None,
    **chosen: Any,
) -> RunTables:
    """Requests with prompts of one length and some output lengths, two rows, a second a step."""
    engine = make_engine(make_limits(**({"max_num_seqs": 2} | dict(sizes or {}))), **chosen)
    for i, length in enumerate(lengths):
        arrival_s = arrivals[i] if arrivals else 0.0
        while engine.has_work and engine.clock.now_s() < arrival_s:
            engine.step()
        engine.clock.wait_until(arrival_s)
        submit(engine, prompt_ids(num_prompt_tokens, salt=i), max_tokens=length)
    run_to_end(engine)
    return save(engine, path, **(choices or {}))


SHORT_OF_MEMORY = {"block_size": 1, "num_blocks": 10, "max_model_len": 9}


def write_blocks(run: RunTables, *changes: tuple[int, int, str, str]) -> RunTables:
    """Add a `blocks.parquet` of (step_id, block_id, holder, kind)."""
    table = pd.DataFrame(changes, columns=["step_id", "block_id", "holder", "kind"])
    table.to_parquet(run.path / "blocks.parquet")
    return RunTables.read(run.path)
