"""A workload that meets everything which could change tokens, on JAX, and what its tokens must be.

Greedy and sampled requests, samples of one prompt, beams, shared and repeated prompts, in tight
memory; blocks that nobody holds are full of NaN. What is expected: each sample from a request of
its own with the sample's seed, served alone; beams from numpy.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from builders import make_policies
from invariants import check_idle
from near_ties import NEAR_TIE, first_difference
from numpy_beams import Found, beam_search
from poisoned import Poisoned
from real_builders import loaded, make_real, random_ids, real_engine

from paxserve.engine import Engine
from paxserve.executor.real import Real
from paxserve.intake import InvalidRequest, seed_of_sample
from paxserve.request import FinishReason, Origin, Request
from paxserve.sampling_params import SamplingParams

NUM_ROWS = 8
MODEL_LEN = 64
NUM_TIGHT_SLOTS = 11 * 16
NUM_HOST_SLOTS = 40 * 16
SHARED = random_ids(20, seed=77)


@dataclass(frozen=True)
class Ask:
    """A request of the workload: `num_own` ids behind the shared ones, or alone. These are its
    own by its number, or those of all that have the same `content`.
    """

    params: SamplingParams
    num_own: int = 0
    is_shared: bool = True
    before_step: int = 0
    content: int | None = None

    def prompt(self, number: int) -> list[int]:
        own = random_ids(self.num_own, seed=number if self.content is None else self.content)
        return SHARED + own if self.is_shared else own


def sampling(num_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": num_tokens, "ignore_eos": True} | values))


def greedy(num_tokens: int) -> SamplingParams:
    return sampling(num_tokens, temperature=0.0)


def beams(width: int, num_tokens: int) -> SamplingParams:
    return sampling(num_tokens, temperature=0.0, beam_width=width)


WORKLOAD = (
    Ask(greedy(14), 3),
    Ask(sampling(12, n=4, temperature=0.9, top_p=0.95, seed=5), 5),
    Ask(sampling(10, temperature=1.0, seed=6), 30, is_shared=False),
    Ask(beams(2, 7), 2, before_step=2),
    Ask(greedy(12), 12, before_step=2, content=44),  # two whole blocks, asked for twice
    Ask(beams(4, 8), 9, is_shared=False, before_step=3),
    Ask(sampling(8, temperature=0.7, top_k=20, seed=7), 12, before_step=5, content=44),
    Ask(beams(3, 6), 1, before_step=6),
    Ask(sampling(6, n=3, temperature=1.2, min_p=0.02, seed=8), 28, before_step=8),
    Ask(greedy(20), 16, is_shared=False, before_step=9),
)


@cache
def executor(model: str, block_size: int) -> Real:
    """Two shapes, and memory for what reserves the longest outputs four times."""
    return make_real(
        loaded(model),
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=MODEL_LEN,
        max_model_len=MODEL_LEN,
        block_size=block_size,
        num_blocks=1 + 5 * MODEL_LEN // block_size,
        num_host_blocks=NUM_HOST_SLOTS // block_size,
        copies=True,
        token_buckets=(MODEL_LEN,),
    )


def engine_of(model: str, block_size: int, policies: dict[str, Any], **sizes: int) -> Engine:
    real, chosen = executor(model, block_size), make_policies(**policies)
    if chosen.reservation.grows:
        sizes.setdefault("num_blocks", 1 + NUM_TIGHT_SLOTS // block_size)
    if chosen.preemption.swaps:
        sizes["num_host_blocks"] = NUM_HOST_SLOTS // block_size
    return Poisoned(real).attach(real_engine(real, loaded(model), policies=policies, **sizes))


def submit(engine: Engine, number: int, params: SamplingParams | None = None) -> Request:
    ask = WORKLOAD[number]
    params = params or ask.params
    origin = Origin(client=f"c{number % 3}", num_true_output_tokens=params.max_tokens)
    prompt = {"prompt_token_ids": ask.prompt(number)}
    return engine.submit(prompt, params, request_id=f"r{number}", origin=origin)


def serve(engine: Engine) -> dict[int, Request]:
    """The workload as it arrives; beams are left out where they cannot be served."""
    served: dict[int, Request] = {}
    waiting = list(range(len(WORKLOAD)))
    for num_steps in range(1000):
        while waiting and WORKLOAD[waiting[0]].before_step <= num_steps:
            number = waiting.pop(0)
            if engine.scheduler.policies.shares or not WORKLOAD[number].params.beam_width:
                served[number] = submit(engine, number)
                continue
            with pytest.raises(InvalidRequest, match="beam search shares blocks"):
                submit(engine, number)
        if not waiting and not engine.has_work:
            check_idle(engine)
            return served
        engine.step()
    raise AssertionError(f"{engine.scheduler.batch.requests} left")


@cache
def alone(model: str, number: int, index: int) -> tuple[int, ...]:
    """Tokens of one sample, as the only sequence of the only request of a fresh engine."""
    params = WORKLOAD[number].params
    if params.temperature:
        params = replace(params, n=1, seed=seed_of_sample(params.seed, index))
    engine = engine_of(model, 16, {}, num_blocks=1 + MODEL_LEN // 16)
    request = submit(engine, number, params)
    while engine.has_work:
        engine.step()
    return tuple(request.output_token_ids)


@cache
def beams_alone(model: str, number: int) -> Found:
    params, prompt = WORKLOAD[number].params, WORKLOAD[number].prompt(number)
    return beam_search(loaded(model), prompt, width=params.beam_width, num_tokens=params.max_tokens)


def differences(model: str, served: dict[int, Request]) -> list[Any]:
    """Of every sequence from what is expected."""
    found = []
    for number, request in served.items():
        assert request.finish_reason is FinishReason.LENGTH, request.error
        if request.beams is not None:
            found.append(beam_difference(beams_alone(model, number), request))
            continue
        for index, sequence in enumerate(request.sequences):
            found.append(
                first_difference(
                    loaded(model),
                    request.prompt_token_ids,
                    request.params,
                    seed=sequence.seed,
                    expected=alone(model, number, index),
                    found=request.output_of(sequence),
                    name=f"{request.request_id}/{index}",
                )
            )
    return [one for one in found if one is not None]


def beam_difference(expected: Found, request: Request) -> Any:
    found = [tuple(request.output_of(sequence)) for sequence in request.sequences]
    scores = [sequence.cumulative_logprob for sequence in request.sequences]
    if found != [beam.tokens for beam in expected.beams]:
        return BeamDifference(request.request_id, expected, found, expected.margin)
    np.testing.assert_allclose(
        scores, [b.cumulative_logprob for b in expected.beams], atol=1e-3, rtol=0
    )
    return None


@dataclass(frozen=True)
class BeamDifference:
    """Beams that are not those of numpy, whose closest choice was by `gap`."""

    name: str
    expected: Found
    found: list[tuple[int, ...]]
    gap: float


def assert_law(model: str, served: dict[int, Request]) -> None:
    """Tokens are equal, but for near ties."""
    found = differences(model, served)
    print(*found, sep="\n")  # shown with the failure, and by pytest -rP
    assert all(difference.gap <= NEAR_TIE for difference in found), found


def serve_alone(number: int) -> Request:
    """One request of the workload, and no other."""
    engine = engine_of("tiny", 16, {})
    request = submit(engine, number)
    while engine.has_work:
        engine.step()
    return request
