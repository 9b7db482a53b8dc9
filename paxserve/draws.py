"""Random draws of workloads, each from a stream of its own.

Owns: how a seed becomes streams, so that drawing more of one thing changes nothing else. In: a seed
and a key. Out: generators and token ids. Must not know: what is drawn for whom.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Stream(IntEnum):
    """What is drawn. The numbers are part of what a seed means."""

    ARRIVALS = 1
    LENGTHS = 2
    CLIENTS = 3
    PRIORITIES = 4
    CONTENT = 5
    GROUPS = 6
    PREFIXES = 7
    BLOCKS = 8


def stream(seed: int, kind: Stream, number: int = 0) -> np.random.Generator:
    """The generator of this kind and number; equal arguments give equal draws."""
    return np.random.default_rng((int(kind), number, seed))


def token_ids(
    num_tokens: int, vocab_size: int, *, seed: int, kind: Stream, number: int
) -> tuple[int, ...]:
    """Uniform over the vocabulary; equal arguments give equal ids."""
    drawn = stream(seed, kind, number).integers(vocab_size, size=num_tokens, dtype=np.int64)
    return tuple(drawn.tolist())


def zipf_shares(num: int, exponent: float) -> npt.NDArray[np.float64]:
    """Shares of `num` things by popularity: the k-th has k**-exponent of the first; 0 is equal."""
    weights = np.arange(1, num + 1, dtype=np.float64) ** -exponent
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares
