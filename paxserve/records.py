"""The record of one executed step, kept for metrics, result files and notices."""

from typing import NamedTuple


class StepRecord(NamedTuple):
    """One executed step. `duration_s` includes `compile_s`; times are the engine clock's."""

    step_id: int
    start_s: float
    duration_s: float
    compile_s: float
    num_compiles: int
    num_rows: int
    num_tokens: int
    padded_rows: int
    padded_tokens: int
    num_running: int
    num_held: int
    num_waiting: int
