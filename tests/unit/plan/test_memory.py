"""Where the bytes go: by hand, and as the engine that is planned has them."""

import csv
import json
import os
from pathlib import Path

import pytest
from cost_builders import KV_BYTES_PER_TOKEN, small_hardware, small_model
from plan_builders import configured, small_setup

from paxserve.assemble import simulated_engine
from paxserve.claims.serving import policies
from paxserve.compose import load_policies
from paxserve.engines import make_engine
from paxserve.hydra_config import compose_config
from paxserve.plan.memory import memory_plan, num_requests, whole_memory
from paxserve.settings import Knobs
from paxserve.sizing import step_bytes

BLOCK = 4 * KV_BYTES_PER_TOKEN
STEP = step_bytes(small_model(), num_tokens=32, num_rows=8)
WEIGHTS = small_model().weight_bytes


def test_terms_by_hand():
    memory = memory_plan(small_setup(memory_utilization=0.5))
    assert (memory.weight_bytes, memory.step_bytes) == (WEIGHTS, STEP)
    assert (memory.estimated_step_bytes, memory.is_compiled) == (STEP, False)
    left = 1_000_000_000 - 1000 - WEIGHTS - STEP
    assert memory.rule_kv_bytes == left // 2
    assert memory.vllm_kv_bytes == 500_000_000 - WEIGHTS - STEP
    # 8 rows of 64 tokens use 128 blocks, and there is the null block.
    assert (memory.num_blocks, memory.kv_bytes) == (129, 129 * BLOCK)
    assert memory.reason == "all that max_num_seqs x max_model_len can use"
    assert memory.num_tokens == 512
    assert memory.left_bytes == left - 129 * BLOCK
    assert memory.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    assert memory.kv_bytes_per_token_and_layer == KV_BYTES_PER_TOKEN // 2


def test_a_pool_that_memory_bounds():
    tight = small_hardware(memory_bytes=1000 + WEIGHTS + STEP + 100 * BLOCK)
    memory = memory_plan(small_setup(hardware=tight, memory_utilization=0.5))
    assert (memory.num_blocks, memory.left_bytes) == (50, 50 * BLOCK)
    assert memory.reason == "memory_utilization=0.5"
    assert [(c.context, c.num_in_memory, c.num_running) for c in memory.capacities] == [(64, 3, 3)]


def test_requests_at_a_context_fill_whole_blocks():
    limits = small_setup().limits()[1]  # 128 blocks of 4
    assert [num_requests(limits, n) for n in (1, 4, 5, 64)] == [128, 128, 64, 8]


def test_memory_holds_more_than_the_rows_of_the_engine():
    setup = small_setup(memory_utilization=1.0, hardware=small_hardware(memory_bytes=100_000_000))
    left = 100_000_000 - 1000 - WEIGHTS - STEP
    assert whole_memory(setup).num_blocks == left // BLOCK > 129
    (capacity,) = memory_plan(setup).capacities
    assert (capacity.num_in_memory, capacity.num_running) == ((left // BLOCK - 1) // 16, 8)


def test_a_compiled_step_takes_the_place_of_the_estimate():
    setup = small_setup(memory_utilization=1.0, workspace_bytes=1_000_000)
    memory = memory_plan(setup)
    assert (memory.step_bytes, memory.is_compiled) == (1_000_000, True)
    assert memory.estimated_step_bytes == STEP
    assert memory.rule_kv_bytes == 1_000_000_000 - 1000 - WEIGHTS - 1_000_000
    assert setup.with_settings(max_num_seqs=4).workspace_bytes is None


PLANNED = [
    "model=llama-3-8b hardware=a100-80g",
    "model=llama-3-8b hardware=rtx4090 limits.max_num_seqs=256 limits.max_num_batched_tokens=2048",
    "model=llama-3-70b hardware=h100 limits.tensor_parallel_size=4 limits.max_num_seqs=512",
    "model=llama-3-70b hardware=tpu-v5e limits.tensor_parallel_size=8 limits.kv_cache_dtype=int8 "
    "limits.max_num_seqs=1024 limits.max_num_batched_tokens=1024 model.num_kv_heads=8 "
    "hardware.memory_bytes=30000000000",
    "model=opt-66b hardware=a100-40g limits.tensor_parallel_size=4 batching=prefill_first "
    "limits.block_size=32",
    "model=opt-13b hardware=a100-40g limits.num_slots_override=15728",
    "model=llama-2-7b hardware=host-cpu limits.kv_cache_memory_bytes=300000000",
    "baseline=vllm_v1 model=qwen3-32b hardware=rtxpro6000",
]


@pytest.mark.parametrize("overrides", PLANNED)
def test_terms_add_up_and_blocks_are_those_of_the_engine(overrides):
    setup = configured(*overrides.split())
    memory = memory_plan(setup)
    terms = (memory.reserved_bytes, memory.weight_bytes, memory.step_bytes, memory.kv_bytes,
             memory.left_bytes)  # fmt: skip
    assert min(terms) >= 0
    assert sum(terms) == memory.memory_bytes
    plain, choices, explicit = compose_config([*overrides.split(), "executor=simulated"])
    knobs = Knobs(plain, explicit)
    axes = {axis: knobs.plain(axis) for axis in ("batching", "preemption", "admission")}
    made = make_engine(
        "simulated",
        knobs,
        load_policies({**choices, "gate": ""}, axes),
        choices=choices,
        seed=0,
        say=lambda line: None,
        logs_blocks=False,
        forks=False,
    )
    limits = made.engine.limits
    assert (memory.num_blocks, memory.block_size) == (limits.num_blocks, limits.block_size)
    assert memory.max_num_batched_tokens == limits.max_num_batched_tokens
    assert setup.limits()[1] == limits


@pytest.mark.parametrize("override", ["num_blocks_override", "num_slots_override"])
def test_the_device_s_pool_and_what_the_host_hands_out_are_two_things(override):
    whole, some = (
        memory_plan(small_setup(memory_utilization=0.5, **more)) for more in ({}, {override: 40})
    )
    assert (some.num_device_blocks, some.kv_bytes) == (129, 129 * BLOCK)
    assert some.left_bytes == whole.left_bytes
    assert some.num_blocks == (40 if override == "num_blocks_override" else 11)
    assert some.num_tokens == (39 if override == "num_blocks_override" else 10) * 4


@pytest.mark.parametrize("spare", [-1, 0, 1000])
def test_a_pool_that_was_asked_for_may_leave_too_little_for_a_step(spare):
    """The engine says so, and the plan has a term below zero."""
    hardware = small_hardware(memory_bytes=1000 + WEIGHTS + 50 * BLOCK + STEP + spare)
    setup = small_setup(hardware=hardware, kv_cache_memory_bytes=50 * BLOCK)
    assert memory_plan(setup).left_bytes == spare
    said = []
    simulated_engine(
        model=setup.model,
        hardware=hardware,
        cost_model=setup.cost_model,
        settings=setup.settings,
        policies=policies(batching="chunked_prefill"),
        say=said.append,
    )
    assert len(said) == (2 if spare < 0 else 1)
    if spare < 0:
        assert "by the estimate of workspace this does not fit" in said[1]
        assert "32 tokens and logits of 8 rows" in said[1]


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"141.1 GB of weights on each of 1 H100 SXM"):
        memory_plan(configured("model=llama-3-70b", "hardware=h100"))


# Pools of others.

DATA = Path(os.environ["PAXSERVE_DATA"]) / "traces" if "PAXSERVE_DATA" in os.environ else None
needs_data = pytest.mark.skipif(DATA is None, reason="PAXSERVE_DATA is not set")


@needs_data
def test_vllm_s_rule_gives_vllm_s_blocks():
    """A recorded run of vLLM 0.19 on an RTX 4090, with its limits."""
    (path,) = (DATA / "llmservingsim" / "vllm_measured").glob("*4090*/meta.json")
    recorded = json.loads(path.read_text())
    asked = recorded["engine_kwargs"]
    setup = configured(
        "model=llama-3.1-8b",
        "hardware=rtx4090",
        *[f"limits.{name}={asked[name]}"
          for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")],
        f"limits.memory_utilization={recorded['kv_cache']['gpu_memory_utilization']}",
    )  # fmt: skip
    memory = memory_plan(setup)
    assert memory.memory_bytes == recorded["hardware"]["device_total_memory_bytes"]
    tokens = memory.vllm_kv_bytes / memory.kv_bytes_per_token
    assert tokens == pytest.approx(recorded["kv_cache"]["num_kv_tokens"], rel=0.02)


@needs_data
@pytest.mark.parametrize(("model", "size"), [("13b", 1), ("13b", 2), ("66b", 4), ("175b", 8)])
def test_distserve_s_capacities_are_near(model, size):
    """Its share of memory is not published; 0.9, the default, comes within 5 %."""
    with (DATA / "distserve" / "max_num_tokens.csv").open() as file:
        rows = list(csv.DictReader(file))
    wanted = (f"facebook/opt-{model}", str(size), "1")
    (found,) = [
        int(row["max_num_tokens"]) for row in rows if (row["model"], row["tp"], row["pp"]) == wanted
    ]
    memory = memory_plan(configured(f"model=opt-{model}", "hardware=a100-80g", f"tp={size}"))
    tokens = size * memory.rule_kv_bytes / memory.kv_bytes_per_token
    assert tokens == pytest.approx(found, rel=0.05)
