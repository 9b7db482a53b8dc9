"""Prompts of those who follow: counted by hand, and against a queue that is played step by step."""

import random
from collections import deque

import pytest

from paxserve.plan import Demand
from paxserve.plan.newcomers import newcomers

DEMAND = Demand(input_tokens=1024, output_tokens=256)


def test_prompts_that_take_several_steps_fill_them():
    """16 rows let 64 tokens a step follow: an eighth of the steps have 496."""
    found = newcomers(DEMAND, num_rows=16, room=496)
    assert found.num_tokens == 496
    assert found.share == pytest.approx(64 / 496)


def test_prompts_that_fit_bring_what_ends_in_one_step():
    rare = newcomers(Demand(input_tokens=100, output_tokens=1000), num_rows=1, room=4096)
    assert rare.num_tokens == 100
    assert rare.share == pytest.approx(0.001)
    often = newcomers(Demand(input_tokens=100, output_tokens=10), num_rows=80, room=4096)
    assert often.num_tokens == 800
    assert often.share == pytest.approx(1.0)


def test_a_single_request_never_waits():
    assert newcomers(DEMAND, num_rows=1, room=496).wait_steps == 0


def played(num_rows, room, steps=60_000):
    """The steps that newcomers waited before their first token was computed, in the mean, and the
    tokens of steps that had any; lengths vary by half either way.
    """
    rng = random.Random(0)

    def ask(now):
        return [now, rng.randint(512, 1536), rng.randint(128, 384)]

    queue, decoding = deque(ask(0) for _ in range(num_rows)), []
    waits, filled, num_decodes = [], [], 0
    for now in range(steps):
        left, decoding = room, [[asked, size, left - 1] for asked, size, left in decoding]
        ended = [one for one in decoding if one[2] <= 0]
        decoding = [one for one in decoding if one[2] > 0]
        num_decodes += len(decoding)
        while queue and left:
            head = queue[0]
            if head[0] is not None:
                waits.append(now - head[0])
                head[0] = None
            taken = min(left, head[1])
            head[1] -= taken
            left -= taken
            if not head[1]:
                decoding.append(queue.popleft())
        if left < room:
            filled.append(room - left)
        queue.extend(ask(now + 1) for _ in ended)
    settled = waits[5 * num_rows :]
    return sum(settled) / len(settled), sum(filled) / len(filled)


@pytest.mark.parametrize("num_rows", [32, 64, 102])
def test_a_queue_that_is_played_waits_as_long(num_rows):
    room = 512 - num_rows
    wait, tokens = played(num_rows, room)
    found = newcomers(DEMAND, num_rows=num_rows, room=room)
    assert found.wait_steps == pytest.approx(wait, rel=0.25, abs=0.1)
    assert found.num_tokens == pytest.approx(tokens, rel=0.25)
