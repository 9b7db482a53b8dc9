"""How the prompts of those who follow share the steps of a batch that is kept full.

Requests end independently of each other, `num_rows / output_tokens` a step, and as many take their
places. Their prompts go through one queue, which the token budget serves: a step that has any of
them takes all that came, or as much as the decodes leave room for, and the others have decodes
alone. So a step costs a mean over both kinds; the cost of the mean step, with the few tokens that
come per step in the mean, would be less, as products work on whole tiles and wait for weights.

A newcomer waits for those before it. The population is fixed, so the queue cannot grow beyond it:
mean value analysis, with half a prompt left of the one that is being served, as all take equally
long. Requests of one length that began together stay apart as they began, and wait less.

Owns: that arithmetic, in tokens and steps. In: rows, room, a `Demand`. Out: `Newcomers`. Must not
know: seconds.

Source: Reiser and Lavenberg, "Mean-value analysis of closed multichain queuing networks", JACM
1980; Reiser, "A queueing network analysis of computer communication networks with window flow
control", IEEE Trans. Comm. 1979 (what is left of a service that is under way).
"""

import math
from typing import NamedTuple

from paxserve.plan import Demand


class Newcomers(NamedTuple):
    """num_tokens: of their prompts in a step that has any. share: of steps that do, from 0 to 1.
    wait_steps: steps with prompts that pass until a newcomer's own prompt begins, in the mean.
    """

    num_tokens: int
    share: float
    wait_steps: float


def newcomers(demand: Demand, *, num_rows: int, room: int) -> Newcomers:
    """Those who keep `num_rows` requests in a batch whose steps have `room` for so many tokens of
    prompts, at least one.
    """
    per_step = num_rows / demand.output_tokens
    together = per_step / -math.expm1(-per_step)  # that end in one step, given that any does
    num_tokens = min(room, round(together * demand.input_tokens))
    return Newcomers(
        num_tokens=num_tokens,
        share=min(1.0, per_step * demand.input_tokens / num_tokens),
        wait_steps=_wait_steps(demand, num_rows, service=demand.input_tokens / room),
    )


def _wait_steps(demand: Demand, num_rows: int, *, service: float) -> float:
    """Of `num_rows` requests that are served for so many steps and then decode: add them one by one
    to the queue that those before them left.
    """
    stay, num_queued, busy = service, 0.0, 0.0
    for number in range(1, num_rows + 1):
        stay = service * (1.0 + num_queued - busy / 2)
        per_step = number / (stay + demand.output_tokens - 1)
        num_queued, busy = per_step * stay, per_step * service
    return stay - service
