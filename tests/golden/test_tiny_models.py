"""Four small models saved by transformers: its tokens and logits, under many schedules.

Each covers what SmolLM2 does not: llama3 rotary scaling, explicit head_dim, biases, a window.
Needs PAXSERVE_DATA.
"""

import numpy as np
import pytest
from builders import run_to_end
from device_forward import device_logits
from invariants import check_idle
from real_builders import (
    TINY_GOLDEN,
    loaded,
    random_ids,
    real_engine,
    shared_real,
    submit_ids,
    tiny_expected,
)

from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook

LOGIT_TOLERANCE = 2e-4
SCHEDULES = {
    "chunks-of-4": {"max_num_batched_tokens": 4},
    "chunks-of-7": {"max_num_batched_tokens": 7},
    "chunks-of-16": {"max_num_batched_tokens": 16},
    "chunks-of-64": {"max_num_batched_tokens": 64},
    "one-row": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "textbook": {"policies": {"batching": Textbook()}},
    "static": {"policies": {"batching": Static()}},
}


def serve(name, *, before=0, after=3, block_size=16, **options):
    """The recorded prompt among others; its request and the engine."""
    expected = tiny_expected(name)
    engine = real_engine(shared_real(name, block_size), loaded(name), **options)
    others = [random_ids(5 + 9 * i, seed=i) for i in range(before + after)]
    for ids in others[:before]:
        submit_ids(engine, ids, max_tokens=20)
    request = submit_ids(
        engine,
        expected["prompt_token_ids"],
        max_tokens=len(expected["greedy_token_ids"]),
    )
    for ids in others[before:]:
        submit_ids(engine, ids, max_tokens=20)
    run_to_end(engine)
    check_idle(engine)
    return request, engine


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", TINY_GOLDEN)
def test_tokens_under_every_schedule(name, schedule):
    request, _ = serve(name, before=1, after=2, **SCHEDULES[schedule])
    assert list(request.output_token_ids) == tiny_expected(name)["greedy_token_ids"]


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("name", ["tiny-llama3-rope-sharded", "tiny-mistral-window"])
def test_tokens_with_other_block_sizes(name, block_size):
    request, _ = serve(name, before=2, after=1, block_size=block_size, max_num_batched_tokens=16)
    assert list(request.output_token_ids) == tiny_expected(name)["greedy_token_ids"]


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("name", TINY_GOLDEN)
def test_tokens_through_preemptions(name, position):
    request, engine = serve(
        name, before=position, after=3 - position, num_blocks=1 + 6, max_num_batched_tokens=32
    )
    assert list(request.output_token_ids) == tiny_expected(name)["greedy_token_ids"]
    assert sum(r.num_preemptions for r in engine.requests) >= 1
    if position == 2:
        assert request.num_preemptions >= 1


@pytest.mark.parametrize("name", TINY_GOLDEN)
def test_logits(name):
    expected, model = tiny_expected(name), loaded(name)
    found = device_logits(model.config, model.parameters, expected["prompt_token_ids"])
    for position, key in ((-1, "logits_last_position"), (10, "logits_position_10")):
        np.testing.assert_allclose(found[position], expected[key], atol=LOGIT_TOLERANCE, rtol=0)
