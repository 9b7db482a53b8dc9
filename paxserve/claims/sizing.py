"""D1-D5: bytes per token, how many requests memory lets in, and how fast one alone can be.

All of it comes from `paxserve plan` for Llama-3-70B on four cards; D1 is held to the arrays that a
device would allocate, D2 and D3 to the requests that an engine of that size really runs at once, D5
to the steps of a simulated request.
"""

from collections.abc import Iterator
from dataclasses import replace

from paxserve.assemble import simulated_engine
from paxserve.claims import Claim, Row, Scale, within
from paxserve.claims.serving import ask, policies, run_to_end
from paxserve.cost_model.roofline import Roofline
from paxserve.models.llama3 import LLAMA_3_70B
from paxserve.plan import Setup
from paxserve.plan.command import setup_of
from paxserve.plan.memory import memory_plan, num_requests, whole_memory
from paxserve.step_shape import decodes
from paxserve.step_work import WorkCounter

GIB = 2**30
SPARE_BYTES = 140 * GIB
NUM_CARDS = 4
NUM_TOKENS = 4096
CARD_BYTES = 80 * 10**9
_LEAST_GIB, _MOST_GIB = 130, 145
DATA_SHEET = Roofline(
    compute_efficiency=1.0,
    bandwidth_efficiency=1.0,
    link_efficiency=1.0,
    host_s_per_step=0.0,
    host_s_per_row=0.0,
)

D1 = Row(
    "D1",
    "KV of Llama-3-70B (80 layers, 8 KV heads, head_dim 128) in bfloat16",
    {
        "bytes per token and layer": 4096,
        "bytes per token": 327_680,
        "GiB per 4,096 tokens": 1.25,
    },
)
D2 = Row("D2", "140 GiB of spare memory", {"requests of 4,096 tokens": 112})
D3 = Row(
    "D3",
    "The same with 64 KV heads (MHA)",
    {"GiB per request": 10.0, "requests of 4,096 tokens": 14},
)
D4 = Row(
    "D4",
    "Weights of 140 GB on four cards of 80e9 bytes, utilisation 0.92: what weights, workspace and "
    "activations leave by vLLM's rule, in which the share is of all memory",
    {"weights, GB": 140, "GiB for KV": 140},
    "130 to 145 GiB, weights 2 %",
)
D5 = Row(
    "D5",
    "One request alone reads all the weights per token: its rate is bounded by bandwidth over "
    "weight bytes (four A100-80G)",
    {"GB read per token on each card": 34.751, "tokens/s at most": 58.67},
    "exact; a simulated request keeps below it, by less than 2 % without latency of the links",
)


def sizing(scale: Scale) -> Iterator[Claim]:
    """D1 to D5."""
    cards = setup_of(["model=llama-3-70b", "hardware=a100-80g", f"tp={NUM_CARDS}"])[0]
    yield _bytes_per_token(cards)
    yield D2.measured({"requests of 4,096 tokens": _num_at_once(_with_spare(cards))})
    mha = _with_spare(
        replace(cards, model=replace(cards.model, num_kv_heads=cards.model.num_heads))
    )
    yield D3.measured(
        {
            "GiB per request": memory_plan(mha).kv_bytes_per_token * NUM_TOKENS / GIB,
            "requests of 4,096 tokens": _num_at_once(mha),
        }
    )
    yield _left(cards)
    yield _one_alone(cards)


def _bytes_per_token(cards: Setup) -> Claim:
    memory = memory_plan(cards)
    values = {
        "bytes per token and layer": memory.kv_bytes_per_token_and_layer,
        "bytes per token": memory.kv_bytes_per_token,
        "GiB per 4,096 tokens": memory.kv_bytes_per_token * NUM_TOKENS / GIB,
    }
    allocated = _allocated_bytes_per_token()
    return D1.measured(
        values,
        holds=values == D1.stated and allocated == memory.kv_bytes_per_token,
        note=f"the arrays of a device take {allocated:,} bytes per token",
    )


def _allocated_bytes_per_token() -> int:
    from paxserve.device.kv_blocks import KvLayout, kv_dtype  # imports jax

    block_size = 16
    layout = KvLayout(LLAMA_3_70B, block_size, "xla", kv_dtype("auto", activations="bfloat16"))
    return layout.bytes_per_block // block_size


def _with_spare(setup: Setup) -> Setup:
    """The cards' KV has 140 GiB together, beside the null block."""
    null_bytes = setup.part.kv_bytes_per_token() * setup.settings.block_size
    return setup.with_settings(
        max_model_len=NUM_TOKENS,
        max_num_seqs=256,
        kv_cache_memory_bytes=SPARE_BYTES // NUM_CARDS + null_bytes,
    )


def _num_at_once(setup: Setup) -> int:
    """Requests of 4,096 tokens that the plan has room for.

    Raises:
        RuntimeError: an engine of this size runs another number of them after its first step.
    """
    planned = num_requests(whole_memory(setup), NUM_TOKENS)
    engine = simulated_engine(
        model=setup.model,
        hardware=setup.hardware,
        cost_model=setup.cost_model,
        settings=setup.settings,
        policies=policies(reservation="max"),
        say=_nobody,
    )
    for _ in range(engine.limits.max_num_seqs):
        ask(engine, 1, 2)
    engine.step()
    if engine.steps[0].num_running != planned:
        raise RuntimeError(f"{planned} requests were planned, {engine.steps[0].num_running} run")
    return planned


def _left(cards: Setup) -> Claim:
    """With vLLM's usual limits of a batch: 256 rows, 2,048 tokens. The claim is of a share of all
    memory; the engine's own share is of what weights and a step leave, so 0.92 leaves more.
    """
    of_80_gb = replace(cards, hardware=replace(cards.hardware, memory_bytes=CARD_BYTES))
    memory = memory_plan(
        of_80_gb.with_settings(
            memory_utilization=0.92, max_num_seqs=256, max_num_batched_tokens=2048
        )
    )
    weights, step = memory.weight_bytes / 1e9, memory.step_bytes / 1e9
    left_gib = NUM_CARDS * memory.vllm_kv_bytes / GIB
    own_gib = NUM_CARDS * memory.rule_kv_bytes / GIB
    reserved = memory.reserved_bytes / 1e9
    by_own = "is" if _LEAST_GIB <= own_gib <= _MOST_GIB else "is not"
    return D4.measured(
        {
            "weights, GB": round(NUM_CARDS * weights, 1),
            "GiB for KV": round(left_gib, 1),
            "GiB for KV, the engine's own rule": round(own_gib, 1),
        },
        holds=_LEAST_GIB <= left_gib <= _MOST_GIB and within(NUM_CARDS * weights, 140, share=0.02),
        note=f"each card 0.92 x 80 GB - {weights:.2f} GB of weights - {step:.2f} GB for a step of "
        f"2,048 tokens and 256 rows = {memory.vllm_kv_bytes / 1e9:.2f} GB, by vLLM's rule; the "
        f"engine's own, 0.92 x (80 - {reserved:.2f} reserved - {weights:.2f} - {step:.2f}), "
        f"leaves {own_gib:.1f} GiB on four, which {by_own} within the claim's bounds",
    )


def _one_alone(cards: Setup) -> Claim:
    setup = replace(cards, cost_model=DATA_SHEET)
    at_once = replace(setup, hardware=replace(setup.hardware, all_reduce_latency_s=0.0))
    counter = WorkCounter.of(setup.model, num_devices=NUM_CARDS)
    read = [counter.of_step(decodes(rows, rows)) for rows in (1, 2)]
    one, two = [work.linear.num_bytes + work.head.num_bytes for work in read]
    weight_bytes = 2 * one - two  # what a second row does not add to
    bound = setup.hardware.bytes_per_s / weight_bytes
    latent, free = _rate(setup), _rate(at_once)
    values = {
        "GB read per token on each card": round(weight_bytes / 1e9, 3),
        "tokens/s at most": round(bound, 2),
    }
    return D5.measured(
        {**values, "tokens/s, simulated": round(free, 2)},
        holds=values == D5.stated and 0.98 * bound < free < bound and latent < free,
        note=f"with {setup.hardware.all_reduce_latency_s * 1e6:g} us per sum over the cards "
        f"{latent:.2f} tokens/s",
    )


def _rate(setup: Setup) -> float:
    """Tokens per second of one request's decodes."""
    engine = simulated_engine(
        model=setup.model,
        hardware=setup.hardware,
        cost_model=setup.cost_model,
        settings=setup.settings,
        policies=policies(),
        say=_nobody,
    )
    ask(engine, 1, 9)
    run_to_end(engine)
    steps = engine.steps[1:]
    return len(steps) / sum(step.duration_s for step in steps)


def _nobody(message: str) -> None:
    """Nobody listens."""
