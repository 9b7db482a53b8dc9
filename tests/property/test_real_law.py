"""The law of tokens on JAX in float32: whatever the policies, a request's tokens are those it has
alone, but for near ties, which are told with their gap.

Every baseline, and every way to preempt, serves the workload of `real_workload.py`.
"""

import numpy as np
import pytest
from baselines.composed import BASELINES, baseline_file, baseline_policies
from near_ties import NEAR_TIE, gap_at
from numpy_llama import logits
from real_builders import loaded
from real_workload import (
    WORKLOAD,
    assert_law,
    differences,
    engine_of,
    greedy,
    serve,
    serve_alone,
)

from paxserve.batching.textbook import Textbook
from paxserve.engine import Engine
from paxserve.preemption.cheapest import Cheapest
from paxserve.preemption.recompute import Recompute
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.radix import Radix


def happened(engine: Engine) -> set[str]:
    """What a run went through, of that which could change tokens."""
    steps = engine.steps
    counts = {
        "preempted": sum(request.num_preemptions for request in engine.requests),
        "recomputed": sum(request.num_recomputed_tokens for request in engine.requests),
        "swapped": sum(step.num_swapped_in for step in steps),
        "copied": sum(step.num_copied for step in steps),
        "hit": sum(step.num_cached_tokens for step in steps),
        "evicted": sum(step.num_evicted for step in steps),
        "held": sum(step.num_held for step in steps),
    }
    return {name for name, count in counts.items() if count}


UNDER_PRESSURE = {"preempted", "recomputed", "copied"}
HAPPENED = dict.fromkeys(BASELINES, UNDER_PRESSURE) | {
    "fastserve": {"preempted", "swapped", "copied"},
    "orca_max": set(),
    "orca_oracle": set(),
    "orca_pow2": set(),
    "past_future": {"copied"},  # its gate foresees what would preempt
    "sglang_lpm": {"hit", "evicted"},  # blocks of one token are never written twice
    "static": {"held"},
    "vllm_v0": UNDER_PRESSURE | {"swapped"},
    "vllm_v1": UNDER_PRESSURE | {"hit", "evicted"},
}


def check_baseline(model: str, name: str) -> None:
    block_size = baseline_file(name).get("limits", {}).get("block_size", 16)
    engine = engine_of(model, block_size, baseline_policies(name))
    served = serve(engine)
    assert_law(model, served)
    assert happened(engine) >= HAPPENED[name]
    assert max(step.num_waiting for step in engine.steps) >= 2
    serves_beams = engine.scheduler.policies.shares
    assert len(served) == len(WORKLOAD) - (0 if serves_beams else 3)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("model", ["tiny", "tiny-llama3-rope-sharded"])
def test_baselines(model, name):
    check_baseline(model, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_baselines_of_a_real_model(name):
    check_baseline("smollm2-135m", name)


FORCED = {
    "recompute": ({"preemption": Recompute()}, UNDER_PRESSURE),
    "swap": ({"preemption": Swap()}, {"preempted", "swapped", "copied"}),
    "cheapest": ({"preemption": Cheapest(swap_s_per_block=45e-6)}, UNDER_PRESSURE | {"swapped"}),
    "swap, radix, textbook": (
        {"preemption": Swap(), "prefix_cache": Radix(), "batching": Textbook()},
        {"preempted", "swapped", "copied", "hit", "evicted"},
    ),
    "recompute, hash chain after the step": (
        {"preemption": Recompute(), "prefix_cache": HashChain("after_step")},
        UNDER_PRESSURE | {"hit", "evicted"},
    ),
}


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize("every", [2, 5])
def test_forced_preemption(name, every):
    """B10: whether a request comes back by copies or by computing, its tokens are the same."""
    policies, expected = FORCED[name]
    engine = engine_of("tiny", 16, policies, preempt_every_steps=every)
    served = serve(engine)
    assert_law("tiny", served)
    assert happened(engine) >= expected
    assert len({request for request in engine.requests if request.num_preemptions}) >= 4
    swaps = engine.scheduler.policies.preemption.swaps
    assert bool(engine.executor.num_poisoned) == swaps


def test_swaps_move_the_bytes_of_their_blocks_and_compute_nothing_twice():
    engine = engine_of("tiny", 16, {"preemption": Swap()}, preempt_every_steps=3)
    serve(engine)
    real, block_bytes = engine.executor.inner, 2 * 2 * 2 * 16 * 16 * 4  # layers, k and v, heads
    assert sum(kv.nbytes for kv in real.kv_blocks) == block_bytes * real.num_device_blocks
    for step, plan in zip(engine.steps, engine.executor.plans, strict=True):
        assert step.swap_bytes == block_bytes * (len(plan.swap_out) + len(plan.swap_in))
    assert sum(step.num_swapped_out for step in engine.steps) >= 40
    assert sum(request.num_recomputed_tokens for request in engine.requests) == 0


# The law sees what breaks it.


def test_a_token_that_differs_is_told_with_its_gap():
    request = serve_alone(0)
    assert differences("tiny", {0: request}) == []
    request.sequence.token_ids[-3] += 1
    (difference,) = differences("tiny", {0: request})
    assert (difference.position, difference.found - difference.expected) == (11, 1)
    assert difference.gap > NEAR_TIE
    with pytest.raises(AssertionError, match="gap=0"):
        assert_law("tiny", {0: request})


def test_beams_that_differ_are_told_with_their_margin():
    request = serve_alone(3)
    assert differences("tiny", {3: request}) == []
    first, second = request.sequences
    first.token_ids, second.token_ids = second.token_ids, first.token_ids
    (difference,) = differences("tiny", {3: request})
    assert difference.gap > NEAR_TIE
    with pytest.raises(AssertionError, match="BeamDifference"):
        assert_law("tiny", {3: request})


def test_the_gap_is_that_of_the_two_best_perturbed_logits():
    """Greedy: of the logits. Sampled: the token is the best, so a gap of another seed differs."""
    model, prompt = loaded("tiny"), WORKLOAD[2].prompt(2)
    last = np.sort(logits(model.config, model.parameters, prompt)[-1])
    gap = gap_at(model, prompt, greedy(1), seed=0, position=0)
    assert gap == pytest.approx(last[-1] - last[-2], abs=1e-5)
    gaps = [gap_at(model, prompt, WORKLOAD[2].params, seed=6, position=i) for i in range(3)]
    assert len(set(gaps)) == 3
    assert min(gaps) > 0
