"""Which padded shapes would have fitted a recorded run best.

Owns: the cost of padding, and the exact search for the ladder that has the least. In: tokens and
rows per step. Out: a `BucketPlan`. Pure. Must not know: files, devices, how steps are run.

A shape for t tokens has min(t, max_num_seqs) rows, whether it is named among `row_buckets` or
`token_buckets`: rows never outnumber tokens, so the smallest shape that holds a step's tokens holds
its rows. A ladder is therefore a set of token counts, and finding the best is a shortest path over
them. Two are always in it, since steps may come to need them: max_num_seqs (a full batch of
decodes) and max_num_batched_tokens.

    cost = padded tokens + row_weight * padded rows, over all steps

A padded token costs matrix products through all layers; a padded row costs logits and sampling.
"""

from dataclasses import dataclass

import numpy as np

from paxserve.device.buckets import Buckets
from paxserve.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What a ladder adds to a run's steps: shares of what is computed."""

    padded_tokens: int
    padded_rows: int
    num_tokens: int
    num_rows: int

    @property
    def token_share(self) -> float:
        """Share of computed tokens that are padding."""
        return 1 - self.num_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def row_share(self) -> float:
        """Share of computed rows that are padding."""
        return 1 - self.num_rows / self.padded_rows if self.padded_rows else 0.0

    def cost(self, row_weight: float) -> float:
        """Padding tokens, and rows by their weight."""
        extra_rows = self.padded_rows - self.num_rows
        return self.padded_tokens - self.num_tokens + row_weight * extra_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """A ladder, as `limits.row_buckets` and `limits.token_buckets` name it."""

    row_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]

    def buckets(self, limits: Limits) -> Buckets:
        """The shapes."""
        return Buckets.for_limits(
            limits, row_buckets=self.row_buckets, token_buckets=self.token_buckets
        )


def padding(buckets: Buckets, num_tokens: np.ndarray, num_rows: np.ndarray) -> Padding:
    """What these shapes would have added to steps of so many tokens and rows.

    Raises:
        ValueError: a step that no shape holds.
    """
    steps = np.stack([num_tokens, num_rows], axis=1)
    kinds, counts = np.unique(steps, axis=0, return_counts=True)
    chosen = np.array(
        [buckets.choose(num_tokens=t, num_rows=r) for t, r in kinds.tolist()], np.int64
    ).reshape(-1, 2)
    padded_tokens, padded_rows = (counts[:, None] * chosen).sum(axis=0).tolist()
    return Padding(
        padded_tokens=padded_tokens,
        padded_rows=padded_rows,
        num_tokens=int(num_tokens.sum()),
        num_rows=int(num_rows.sum()),
    )


def best_buckets(
    num_tokens: np.ndarray,
    num_rows: np.ndarray,
    *,
    limits: Limits,
    max_shapes: int,
    row_weight: float = 1.0,
) -> BucketPlan:
    """The ladder of at most `max_shapes` shapes that pads least; of equals the shortest.

    Raises:
        ValueError: too few shapes for the two that must be there, or a weight that is none.
    """
    fixed = sorted({limits.max_num_seqs, limits.max_num_batched_tokens})
    if not isinstance(max_shapes, int) or isinstance(max_shapes, bool) or max_shapes < len(fixed):
        raise ValueError(
            f"max_shapes must be at least {len(fixed)} (max_num_seqs={limits.max_num_seqs} and "
            f"max_num_batched_tokens={limits.max_num_batched_tokens} are always there), "
            f"got {max_shapes!r}"
        )
    if not 0 <= row_weight < np.inf:
        raise ValueError(f"row_weight must be a number >= 0, got {row_weight!r}")
    rungs = np.union1d(num_tokens, fixed).astype(np.int64)
    counts = np.bincount(np.searchsorted(rungs, num_tokens), minlength=len(rungs))
    costs = rungs + row_weight * np.minimum(rungs, limits.max_num_seqs)
    sizes = rungs[_shortest_path(costs, counts, np.isin(rungs, fixed), max_shapes)].tolist()
    most = limits.max_num_seqs
    return BucketPlan(
        row_buckets=tuple(size for size in sizes if size <= most),
        token_buckets=tuple(s for s in sizes if s > most) or (limits.max_num_batched_tokens,),
    )


def _shortest_path(
    costs: np.ndarray, counts: np.ndarray, is_fixed: np.ndarray, max_shapes: int
) -> list[int]:
    """Rungs to keep: up to the last, over every fixed one.

    Args:
        costs: of a step padded to each rung. Its own tokens and rows are the same under every
            ladder, so they are left out.
        counts: steps that would fit exactly.
        is_fixed: rungs that must be kept; the last is.
        max_shapes: most rungs.
    """
    size = len(costs)
    upto = np.cumsum(counts)  # steps that fit into a rung
    fixed_below = np.maximum.accumulate(np.where(is_fixed, np.arange(size), -1))
    fixed_below = np.concatenate([[-1], fixed_below[:-1]])
    # best[j]: least cost of the steps up to rung j, the last of as many rungs as there were rounds.
    best = np.where(fixed_below < 0, upto * costs, np.inf)
    came_from, found = [], [best[-1]]
    for _ in range(1, min(max_shapes, size)):
        longer, before = np.full(size, np.inf), np.full(size, -1)
        for j in range(1, size):
            first = max(fixed_below[j], 0)
            through = best[first:j] + (upto[j] - upto[first:j]) * costs[j]
            before[j] = first + int(through.argmin())
            longer[j] = through.min()
        best = longer
        came_from.append(before)
        found.append(best[-1])
    ladder = [size - 1]
    for before in reversed(came_from[: int(np.argmin(found))]):
        ladder.append(int(before[ladder[-1]]))
    return ladder[::-1]
