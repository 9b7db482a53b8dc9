"""The record of one executed step, and the log of all of them.

Owns: `StepRecord`, and how many of them are kept in little memory. Out: records, or columns, for
metrics, result files and notices. Must not know: what a step does.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np


class StepRecord(NamedTuple):
    """One executed step. `duration_s` includes `compile_s`; times are the engine clock's.

    num_rows, num_tokens, num_blocks: really computed, and blocks read through the tables. padded_*:
    of the shape that ran; `padded_blocks` is rows times the width of the table, which is moved but
    not read, or 0 where no table is. num_running, num_waiting: requests; num_held: finished, not
    released. num_entered_tokens: known tokens of requests that entered in this step;
    num_cached_tokens: of these, found in the prefix cache.
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


_TIMES = ("start_s", "duration_s", "compile_s")
_COUNTS = tuple(name for name in StepRecord._fields if name not in (*_TIMES, "terms_s"))


class StepLog(Sequence[StepRecord]):
    """Records as 8 bytes per number; one is made anew for whoever asks. Equal to any sequence of
    equal records.

    Invariant: all records have as many terms. `counts` are the fields that are whole numbers.
    """

    counts = _COUNTS

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self._counts = array("q")
        self._times = array("d")
        self._num_terms = 0
        for record in records:
            self.append(record)

    def append(self, record: StepRecord) -> None:
        """One more step."""
        step_id, start_s, duration_s, compile_s, *counts, terms_s = record
        self._counts.append(step_id)
        self._counts.extend(counts)
        self._times.extend((start_s, duration_s, compile_s, *terms_s))
        self._num_terms = len(terms_s)

    def extend_run(self, like: StepRecord, columns: Mapping[str, np.ndarray]) -> None:
        """Several more steps: each field as in `like`, or as its own column says."""
        num_steps = len(columns["start_s"])
        counts = np.tile(
            np.array([getattr(like, name) for name in _COUNTS], np.int64), (num_steps, 1)
        )
        times = np.zeros((num_steps, len(_TIMES) + self._num_terms))
        times[:, len(_TIMES) :] = columns["terms_s"]
        for name, column in columns.items():
            if name in _COUNTS:
                counts[:, _COUNTS.index(name)] = column
            elif name in _TIMES:
                times[:, _TIMES.index(name)] = column
        self._counts.frombytes(counts.tobytes())
        self._times.frombytes(times.tobytes())

    def column(self, name: str, steps: slice = slice(None)) -> np.ndarray:
        """One field of all steps, or of some; i64 or f64, `terms_s` is [steps, terms]."""
        if name in _COUNTS:
            counts = np.frombuffer(self._counts, np.int64).reshape(-1, len(_COUNTS))
            return counts[steps, _COUNTS.index(name)].copy()
        times = np.frombuffer(self._times, np.float64)
        times = times.reshape(-1, len(_TIMES) + self._num_terms)[steps]
        own = slice(len(_TIMES), None) if name == "terms_s" else _TIMES.index(name)
        return times[:, own].copy()

    def __len__(self) -> int:
        return len(self._counts) // len(_COUNTS)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [self._record(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        return self._record(index % len(self))

    def __iter__(self) -> Iterator[StepRecord]:
        return map(self._record, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _record(self, i: int) -> StepRecord:
        width = len(_TIMES) + self._num_terms
        step_id, *counts = self._counts[i * len(_COUNTS) : (i + 1) * len(_COUNTS)]
        start_s, duration_s, compile_s, *terms_s = self._times[i * width : (i + 1) * width]
        values = (step_id, start_s, duration_s, compile_s, *counts, tuple(terms_s))
        return StepRecord._make(values)
