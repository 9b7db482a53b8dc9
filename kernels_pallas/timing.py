"""Seconds of one call on the device, without the host's part of it.

Owns: the loop around a call, and how many rounds are enough. A call is repeated inside one compiled
loop in which each takes what the one before returned, so nothing is left out or run side by side,
and the host only starts the loop. What a call computes from its fixed arguments alone, such as a
list of work items, the compiler may move out of the loop; a model step shares it between its layers
likewise. Must not know: what is called.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_LEAST_ROUND_S = 0.02
_MOST_CALLS = 2000


class Timing(NamedTuple):
    """Seconds per call over some rounds: the middle one, the least and the most."""

    median_s: float
    least_s: float
    most_s: float
    num_rounds: int
    num_calls: int  # of a round


def seconds_per_call[Carry](
    call: Callable[..., Carry],
    first: Carry,
    *fixed: Any,
    num_rounds: int = 15,
    limit_s: float = math.inf,
) -> Timing:
    """Time `call` on the device where `first` lies.

    Args:
        call: takes what it returned before, and the fixed arguments; shapes and dtypes stay.
        first: what it takes first. Donated: gone afterwards.
        fixed: arrays; passed on, so that they do not become constants of the program.
        num_rounds: measured rounds, each a loop of at least 20 ms, after one that is not counted.
        limit_s: no round is begun that would end later than this, compiling included, so a slow
            call has fewer of them.
    Raises:
        TimeoutError: not one round ended in time.
    """
    ends_s = time.perf_counter() + limit_s

    def many(carry: Carry, num_calls: jax.Array, fixed: tuple[Any, ...]) -> Carry:
        return jax.lax.fori_loop(0, num_calls, lambda _, carry: call(carry, *fixed), carry)

    run = jax.jit(many, donate_argnums=0)

    def timed(carry: Carry, num_calls: int) -> tuple[Carry, float]:
        started_s = time.perf_counter()
        carry = jax.block_until_ready(run(carry, num_calls, fixed))
        return carry, time.perf_counter() - started_s

    carry, _ = timed(first, 1)  # compiles
    num_calls = 1
    seconds = 0.0
    while time.perf_counter() < ends_s:
        carry, seconds = timed(carry, num_calls)
        if seconds >= _LEAST_ROUND_S or num_calls >= _MOST_CALLS:
            break
        wanted = num_calls * 1.3 * _LEAST_ROUND_S / max(seconds, 1e-6)
        num_calls = min(_MOST_CALLS, max(num_calls + 1, int(wanted)))
    found = []
    for _ in range(num_rounds):
        if time.perf_counter() + seconds > ends_s:
            break
        carry, seconds = timed(carry, num_calls)
        found.append(seconds / num_calls)
    if not found:
        raise TimeoutError(f"no round of {num_calls=} ended within {limit_s=:.3g}")
    return Timing(statistics.median(found), min(found), max(found), len(found), num_calls)
