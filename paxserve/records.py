"""The record of one executed step, kept for metrics, result files and notices."""

from typing import NamedTuple


class StepRecord(NamedTuple):
    """One executed step. `duration_s` includes `compile_s`; times are the engine clock's.

    num_rows, num_tokens, num_blocks: really computed, and blocks read through the tables. padded_*:
    of the shape that ran; `padded_blocks` is rows times the width of the table, which is moved but
    not read. num_running, num_waiting: requests; num_held: finished, not released.
    num_entered_tokens: known tokens of requests that entered in this step; num_cached_tokens: of
    these, found in the prefix cache.
    num_evicted, num_copied, num_swapped_out, num_swapped_in: blocks. num_used_blocks: held by
    somebody, each once. num_shared_owners: slots of shared blocks, once per holder beyond the
    first. largest_free_run: blocks, -1 where any free block will do. terms_s: of a simulated step's
    duration, in the order of the executor's `terms`.
    """

    step_id: int
    start_s: float
    duration_s: float
    compile_s: float
    num_compiles: int
    num_rows: int
    num_tokens: int
    num_blocks: int
    padded_rows: int
    padded_tokens: int
    padded_blocks: int
    num_running: int
    num_held: int
    num_waiting: int
    num_entered_tokens: int
    num_cached_tokens: int
    num_evicted: int
    num_copied: int
    num_swapped_out: int
    num_swapped_in: int
    swap_bytes: int
    num_used_blocks: int
    num_shared_owners: int
    largest_free_run: int
    terms_s: tuple[float, ...] = ()
