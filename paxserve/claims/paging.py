"""E2: paging makes no step faster, the server gets bigger.

Measured on JAX: two layers of SmolLM2's size with random weights, since what a step takes does not
depend on them. Source: Kwon et al., SOSP'23, sections 4.3 and 7.1.
"""

import statistics
from collections.abc import Iterator

from paxserve.claims import Claim, Row, Scale, within
from paxserve.claims.constant import Constant
from paxserve.claims.serving import ask, make_engine, make_limits, policies
from paxserve.engine import Engine
from paxserve.executor import Executor
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.models.random_parameters import random_parameters
from paxserve.policies import Policies

NUM_ROWS, NUM_PROMPT, MAX_MODEL_LEN = 16, 16, 512
_STEP_TIME, _AT_ONCE = "step time, paged / contiguous", "requests at once, paged / contiguous"
_CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=576,
    mlp_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=MAX_MODEL_LEN,
    tie_embeddings=True,
)

E2 = Row(
    "E2",
    "Paging makes nothing faster per token; the server gets bigger: equal step time at equal "
    "batch, a larger batch at equal memory",
    {_STEP_TIME: 1.0, _AT_ONCE: "over 1"},
    "10 %",
)


def paging(scale: Scale) -> Iterator[Claim]:
    """E2: the same decodes over blocks that lie as they were taken, and over reserved runs."""
    num_output = scale.of(240, 80)
    ratio = _step_time(_paged(), _contiguous(), num_output)
    paged_at_once, at_once = (_at_once(chosen, num_output) for chosen in (_paged(), _contiguous()))
    yield E2.measured(
        {_STEP_TIME: round(ratio, 3), _AT_ONCE: round(paged_at_once / at_once, 2)},
        holds=within(ratio, 1.0, share=0.1) and paged_at_once > at_once,
        note=f"wall time on JAX, median over steps of {NUM_ROWS} decodes each run in both engines; "
        f"on average {paged_at_once:.1f} and {at_once:.1f} requests of {NUM_PROMPT + num_output} "
        f"tokens run at once where {MAX_MODEL_LEN} are allowed",
    )


def _paged() -> Policies:
    return policies(batching="chunked_prefill")


def _contiguous() -> Policies:
    return policies(batching="chunked_prefill", reservation="max", placement="first_fit")


def _step_time(paged: Policies, contiguous: Policies, num_output: int) -> float:
    """Ratio of wall times; the engines take turns, so that noise of the machine meets both."""
    limits = _limits(NUM_ROWS)
    engines = [
        _filled(limits, chosen, _on_jax(limits), num_output) for chosen in (paged, contiguous)
    ]
    ratios = []
    while engines[0].has_work:
        for engine in engines:
            engine.step()
        ours, base = (engine.steps[-1] for engine in engines)
        if ours.num_compiles == base.num_compiles == 0:
            ratios.append(ours.duration_s / base.duration_s)
    return statistics.median(ratios)


def _at_once(chosen: Policies, num_output: int) -> float:
    """How many run together in the same memory, when rows are no limit: the mean over steps."""
    engine = _filled(_limits(8 * NUM_ROWS), chosen, Constant(), num_output)
    while engine.has_work:
        engine.step()
    return statistics.mean(step.num_running for step in engine.steps)


def _limits(max_num_seqs: int) -> Limits:
    return make_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * NUM_PROMPT,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=NUM_ROWS * MAX_MODEL_LEN // 16 + 1,
    )


def _filled(limits: Limits, chosen: Policies, executor: Executor, num_output: int) -> Engine:
    """With as many requests as there are rows."""
    engine = make_engine(limits, chosen, executor=executor)
    for i in range(limits.max_num_seqs):
        ask(engine, range(i, i + NUM_PROMPT), num_output)
    return engine


def _on_jax(limits: Limits) -> Executor:
    from paxserve.device import compile_cache  # imports jax
    from paxserve.device.buckets import Bucket, Buckets
    from paxserve.executor.real import Real

    compile_cache.enable()
    shapes = (Bucket(NUM_ROWS, NUM_ROWS), Bucket(limits.max_num_batched_tokens, NUM_ROWS))
    parameters = random_parameters(_CONFIG)
    return Real(config=_CONFIG, parameters=parameters, limits=limits, buckets=Buckets(shapes))
