"""Each baseline of `configs/baseline/` does, step by step, what a naive transcription of the
published rule does: same requests, same tokens, same order, same preemptions.

Transcriptions use nothing of paxserve; see `clockwork.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from baselines import feedback_queue
from baselines.clockwork import Rule, Sizes, schedule
from baselines.comparison import random_case, served
from baselines.composed import BASELINES
from baselines.fastserve import FastServe
from baselines.orca import OrcaMax, OrcaOracle, OrcaPow2
from baselines.past_future import PastFuture
from baselines.sarathi import Sarathi
from baselines.sglang_lpm import SglangLpm
from baselines.simple_chunking import SimpleChunking
from baselines.sjf import Sjf
from baselines.srpt import Srpt
from baselines.static import Static
from baselines.vllm_v0 import VllmV0
from baselines.vllm_v1 import VllmV1
from baselines.vtc import Vtc

NUM_CASES = 200
type Settings = dict[str, dict[str, Any]]


class Baseline(NamedTuple):
    """A transcription, and how its knobs are named in the policies. `least_preempted`: of the
    preemptions that its cases must hold together, so that they show that rule too.
    """

    rule: type[Rule]
    settings: Callable[[Sizes], Settings] = lambda sizes: {}
    least_preempted: int = 0
    block_size: int | None = None
    shares: bool = False


def watermark(sizes):
    return {"watermark": {"share": sizes.watermark}}


def threshold(sizes):
    return {"running_first": {"long_prefill_token_threshold": sizes.threshold}}


MLFQ = {
    "first_quantum_s": feedback_queue.QUANTUM,
    "num_levels": feedback_queue.LEVELS,
    "prefill_s_per_token": feedback_queue.PER_TOKEN,
    "starvation_s": feedback_queue.STARVES,
}
CASES = {
    "static": Baseline(Static, block_size=1),
    "orca_max": Baseline(OrcaMax, block_size=1),
    "orca_pow2": Baseline(OrcaPow2, block_size=1),
    "orca_oracle": Baseline(OrcaOracle, block_size=1),
    "vllm_v0": Baseline(VllmV0, watermark, 50),
    "sarathi": Baseline(Sarathi, watermark, 50),
    "simple_chunking": Baseline(SimpleChunking, watermark, 50),
    "vllm_v1": Baseline(VllmV1, threshold, 50, shares=True),
    "sglang_lpm": Baseline(
        SglangLpm,
        lambda sizes: {
            "longest_prefix_hit": {"shared_tokens": sizes.shared},
            "token_ratio": {"initial": sizes.ratio, "minimum": 0.14 * sizes.ratio},
        },
        10,
        block_size=1,
        shares=True,
    ),
    "fastserve": Baseline(FastServe, lambda sizes: {"mlfq": MLFQ}, 50),
    "vtc": Baseline(Vtc, threshold, 50),
    "sjf": Baseline(Sjf, threshold, 50),
    "srpt": Baseline(Srpt, threshold, 50),
    # Of single tokens, since the paper counts tokens and a pool whole blocks.
    "past_future": Baseline(PastFuture, threshold, 20, block_size=1),
}


def test_every_baseline_has_a_transcription():
    assert sorted(CASES) == BASELINES


@pytest.mark.parametrize("name", CASES)
def test_the_composed_policies_do_what_the_published_rule_says(name):
    baseline = CASES[name]
    num_preempted = 0
    for seed in range(NUM_CASES):
        case = random_case(name, seed, block_size=baseline.block_size, shares=baseline.shares)
        expected = schedule(case.jobs, baseline.rule(case.sizes))
        found = served(case, name, baseline.settings(case.sizes))
        for number, pair in enumerate(zip(expected, found, strict=False)):
            assert pair[0] == pair[1], f"step {number} of case {seed}: {case}"
        assert len(expected) == len(found)
        num_preempted += sum(len(step.preempted) for step in expected)
    assert num_preempted >= baseline.least_preempted
    if not baseline.least_preempted:
        assert num_preempted == 0  # reservations that never grow
