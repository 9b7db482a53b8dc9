"""A model that is a hash: what the scripted executor computes instead of a forward pass.

Owns: the value a token leaves in its KV slot, the next token of a context, and log-probabilities
that go with it. In and out: numpy arrays and numbers. Must not know: slots, rows, steps.

A context's digest is the mix of the sum, over its tokens, of value x (position + 1).
"""

import numpy as np

from paxserve.step import TokenLogprobs

UNWRITTEN = np.uint64(0)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_SCALE_BITS = 20
_ALL_BITS = 2**64 - 1


def kv_values(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What tokens at these positions leave in their slots; never `UNWRITTEN`."""
    return mix(tokens.astype(np.uint64) + mix(positions.astype(np.uint64)))


def mix(values: np.ndarray) -> np.ndarray:
    """Spread 64-bit values (splitmix-like); zero is kept out, since it means unwritten."""
    mixed = (values + np.uint64(1)) * _MIX
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX
    return mixed | np.uint64(1)


def mix_one(value: int) -> int:
    """`mix` of a single number."""
    mixed = (value + 1) * int(_MIX) & _ALL_BITS
    mixed ^= mixed >> int(_SHIFT)
    return mixed * int(_MIX) & _ALL_BITS | 1


def token_logprobs(digest: int, token: int, *, num: int, vocab_size: int) -> TokenLogprobs:
    """The chosen token's log-probability and rank, and the `num` best ids.

    The best id is the digest's own next token, the others follow it in the order of ids. The
    log-probability of rank r is -r times a scale that the digest gives, in steps of 2**-20: sums
    of them are exact, so a beam's score does not depend on the order of adding.
    """
    best = digest % vocab_size
    scale = ((digest >> 64 - _SCALE_BITS) + 1) / 2**_SCALE_BITS
    rank = (token - best) % vocab_size + 1
    ranks = range(1, min(num, vocab_size) + 1)
    return TokenLogprobs(
        logprob=-scale * rank,
        rank=rank,
        top_ids=tuple([(best + r - 1) % vocab_size for r in ranks]),
        top_logprobs=tuple([-scale * r for r in ranks]),
    )
