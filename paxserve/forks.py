"""How the sequences of one request share what they have in common.

Owns: where a sequence branches off another of its request, and how tokens granted to a request are
spread over its sequences. Pure, over the counts of `Sequence`. Must not know: blocks, budgets.

A request with several sequences is computed as a tree. Its first live sequence is the trunk; every
other takes over the tokens it shares with an earlier one (its `source`) and computes the rest:

    trunk     |== prompt ==|-- output 0 --|
    source ---+            |-- output 1 --|   shares whole blocks with the trunk, computes the rest
    source ----------------+-- output 2 --|

Sequences that have no output yet share the whole prompt. Each must still look at the last prompt
token to sample from it, but its KV is written once, by the trunk: the others read it again.
"""

from typing import NamedTuple

from paxserve.request import Request, Sequence, set_computed


class Claim(NamedTuple):
    """The next `num_tokens` tokens of a sequence are to be computed."""

    sequence: Sequence
    num_tokens: int


def plan_forks(request: Request, *, block_size: int) -> None:
    """Before a request with several sequences enters: each but the trunk gets its source, and
    counts the tokens it will share as computed.
    """
    for i, sequence in enumerate(request.live[1:], start=1):
        earlier = request.live[:i]
        start = request.num_prompt_tokens
        lengths = [_num_common(sequence, other, start, block_size) for other in earlier]
        longest = max(lengths)
        set_computed(sequence, longest)
        sequence.source = earlier[lengths.index(longest)] if longest else None


def reads_again(sequence: Sequence) -> bool:
    """Whether a sequence with a source has no token of its own to compute, so that it only reads
    its last one, which the source writes.
    """
    return sequence.source is not None and sequence.token_ids == sequence.source.token_ids


def spread(request: Request, num_tokens: int) -> list[Claim]:
    """Who computes what of `num_tokens` tokens granted to a request.

    The last known token of each sequence is where it samples; all live sequences come to theirs in
    the same step, so short of that only the tokens before it are computed, in order.
    """
    live = request.live
    if len(live) == 1:
        return [Claim(live[0], num_tokens)]
    is_all = num_tokens == request.num_remaining_tokens
    left = num_tokens - len(live) if is_all else num_tokens
    claims = []
    for sequence in live:
        num_own = min(left, sequence.num_remaining_tokens - 1)
        left -= num_own
        if num_own or is_all:
            claims.append(Claim(sequence, num_own + is_all))
    return claims


def num_grantable(request: Request, num_tokens: int, *, num_budget: int, largest_step: int) -> int:
    """How many of `num_tokens` asked for are granted: all that remain, or some of those before the
    sampling ones; 0 if that is beyond the budget.

    Several sequences may have more to compute than any step can hold. Then even what is asked for
    as a whole is split.
    """
    remaining = request.num_remaining_tokens
    if len(request.live) > 1 and num_budget < num_tokens and remaining > largest_step:
        num_tokens = num_budget
    if num_tokens >= remaining:
        num_tokens = remaining
    elif len(request.live) > 1:
        num_tokens = min(num_tokens, remaining - len(request.live))
    return num_tokens if num_tokens <= num_budget else 0


def _num_common(sequence: Sequence, source: Sequence, start: int, block_size: int) -> int:
    """Tokens that `sequence` can take over, which are the same up to `start`: all but its last one
    where both know the same, else whole blocks, since the last common block goes on differently.
    """
    mine, theirs = sequence.token_ids, source.token_ids
    if mine == theirs:
        return len(mine) - 1
    limit = min(len(mine), len(theirs)) - 1
    num_equal = next((i for i in range(min(start, limit), limit) if mine[i] != theirs[i]), limit)
    return num_equal // block_size * block_size
