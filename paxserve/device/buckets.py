"""The padded shapes that are compiled: a short ladder of (tokens, rows).

Owns: which shapes exist, and the choice of one for a step. Pure Python. Blocks per row are not
padded to a ladder: the table is always as wide as `max_model_len`, and the kernel's trip count
follows the real contexts.
"""

from dataclasses import dataclass
from typing import NamedTuple

from paxserve.limits import Limits


class Bucket(NamedTuple):
    """One padded shape."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Shapes in increasing order of tokens, then rows."""

    shapes: tuple[Bucket, ...]

    @classmethod
    def for_limits(
        cls,
        limits: Limits,
        *,
        row_buckets: tuple[int, ...] = (),
        token_buckets: tuple[int, ...] = (),
    ) -> "Buckets":
        """Decode shapes (r, r) for each row bucket, and (t, max_num_seqs) for each token bucket.

        Args:
            limits: nothing is padded beyond its rows and its budget.
            row_buckets: default: the most rows, and a quarter and a sixteenth of them.
            token_buckets: default: the budget, and a quarter and a sixteenth of it.

        Raises:
            ValueError: a bucket lies beyond the limits, or none covers them.
        """
        rows = _rungs("row_buckets", row_buckets, limits.max_num_seqs)
        tokens = _rungs("token_buckets", token_buckets, limits.max_num_batched_tokens)
        decode = {Bucket(r, r) for r in rows}
        mixed = {Bucket(t, min(t, limits.max_num_seqs)) for t in tokens}
        return cls(tuple(sorted(decode | mixed)))

    def choose(self, *, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest shape that holds the step."""
        for bucket in self.shapes:
            if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows:
                return bucket
        raise ValueError(
            f"no bucket holds {num_tokens} tokens in {num_rows} rows; the ladder is "
            f"{[tuple(bucket) for bucket in self.shapes]}: add one that does"
        )


class Exact:
    """No padding: every step has its own shape. For executors that compile nothing."""

    def choose(self, *, num_tokens: int, num_rows: int) -> Bucket:
        """The step's own shape."""
        return Bucket(num_tokens, num_rows)


def _rungs(name: str, given: tuple[int, ...], limit: int) -> tuple[int, ...]:
    rungs = given or (max(1, limit // 16), max(1, limit // 4), limit)
    if min(rungs) < 1 or max(rungs) != limit:
        raise ValueError(f"{name}={rungs} must lie in 1..{limit} and end with {limit}")
    return rungs
