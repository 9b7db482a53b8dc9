"""The steps that are measured: of every padded shape, over what else a step's time depends on.

Owns: the design. In: the ladder of shapes, and how long contexts can be. Out: `Probe`s, as plans of
rows. Must not know: executors, time.

    designed   decodes at several numbers of rows x contexts; one and several chunks of several
               lengths x contexts behind which they stand; decodes beside a chunk
    drawn      everything at random, each row by itself: what no grid has

Rows of one designed step have contexts of several lengths around the one that it is for, since a
kernel may like a length: all multiples of 256 took a tenth less than others on a CPU.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from paxserve.device.buckets import Bucket, Buckets
from paxserve.step import RowPlan, Rows, StepPlan

SHARES = (0.0, 0.4, 0.8)  # of the longest context
SPREAD = 0.25  # up to so much of a context, more or less, row by row
GOLDEN = 0.618034  # multiples of it, less their whole part, are spread evenly
LEVELS = (0.0, 0.1, 0.3, 0.6, 1.0)  # of the rows and tokens that a shape holds
NUM_CHUNKS = 3  # where there are several
TRIES = 1000


class Probe(NamedTuple):
    """One step. Each row computes `num_tokens` tokens from `first_position` on; one is a decode."""

    rows: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """All rows together."""
        return sum([num_tokens for _, num_tokens in self.rows])

    def plan(self, step_id: int) -> StepPlan:
        """Sequence i in row i; its table must hold its tokens."""
        if all(num_tokens == 1 for _, num_tokens in self.rows):
            ids = list(range(len(self.rows)))
            return StepPlan(step_id, Rows.decodes(ids, ids, [first for first, _ in self.rows]))
        rows = [
            RowPlan(i, i, first, num, 1, () if num == 1 else tuple(range(num)))
            for i, (first, num) in enumerate(self.rows)
        ]
        return StepPlan(step_id, Rows.of(rows))


def designed(buckets: Buckets, *, longest: int) -> list[Probe]:
    """Steps on a grid, of every shape; `longest`: known tokens of a row."""
    probes = dict.fromkeys(
        [
            probe
            for bucket in buckets.shapes
            for probe in _grid(bucket, longest)
            if fits(probe, bucket, buckets, longest=longest)
        ]
    )
    return list(probes)


def drawn(
    buckets: Buckets, *, longest: int, num_each: int, rng: np.random.Generator
) -> list[Probe]:
    """`num_each` random steps of every shape, fewer where few exist."""
    probes = []
    for bucket in buckets.shapes:
        found: list[Probe] = []
        for _ in range(TRIES):
            probe = _random(bucket, longest, rng)
            if fits(probe, bucket, buckets, longest=longest):
                found.append(probe)
            if len(found) == num_each:
                break
        probes += found
    return probes


def fits(probe: Probe, bucket: Bucket, buckets: Buckets, *, longest: int) -> bool:
    """Whether it is a step that would be padded to this shape."""
    if not probe.rows or min([num for _, num in probe.rows]) < 1:
        return False
    if min([first for first, _ in probe.rows]) < 0 or max(map(sum, probe.rows)) > longest:
        return False
    if probe.num_tokens > bucket.num_tokens or len(probe.rows) > bucket.num_rows:
        return False
    return buckets.choose(num_tokens=probe.num_tokens, num_rows=len(probe.rows)) == bucket


def _grid(bucket: Bucket, longest: int) -> Iterator[Probe]:
    most, rows = bucket.num_tokens, bucket.num_rows
    for num_rows, share in product(_levels(1, rows), SHARES):
        yield _step([1] * num_rows, share, longest)
    for num_tokens, share in product(_levels(2, most), SHARES):
        for num_chunks in (1, NUM_CHUNKS):
            yield _step([num_tokens // num_chunks] * num_chunks, share, longest)
        for num_rows in (rows // 2, rows - 1):
            yield _step([*[1] * num_rows, num_tokens - num_rows], share, longest)


def _step(lengths: list[int], share: float, longest: int) -> Probe:
    """Rows of these lengths, as far as a row can have them, behind contexts of this share."""
    rows = []
    for i, length in enumerate(lengths):
        length = min(length, longest)
        behind = share * (1 - SPREAD + 2 * SPREAD * (i * GOLDEN % 1)) * (longest - length)
        rows.append((int(behind), length))
    return Probe(tuple(rows))


def _levels(low: int, high: int) -> list[int]:
    """A few numbers between bounds, more of them towards the lower end."""
    return sorted({round(low + (high - low) * share) for share in LEVELS})


def _random(bucket: Bucket, longest: int, rng: np.random.Generator) -> Probe:
    num_rows = int(rng.integers(1, bucket.num_rows + 1))
    num_tokens = int(rng.integers(num_rows, max(num_rows, bucket.num_tokens) + 1))
    num_chunks = min(num_rows, int(rng.integers(0, NUM_CHUNKS + 1)))
    lengths = np.ones(num_rows, np.int64)
    if num_chunks:
        cuts = np.sort(rng.integers(0, num_tokens - num_rows + 1, num_chunks - 1))
        lengths[-num_chunks:] += np.diff([0, *cuts, num_tokens - num_rows])
    ends = np.maximum(lengths, np.exp(rng.uniform(0, np.log(longest), num_rows)).astype(np.int64))
    return Probe(tuple(zip((ends - lengths).tolist(), lengths.tolist(), strict=True)))
