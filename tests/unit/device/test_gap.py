"""How near a token was to being another one, against what the engine itself reports."""

import numpy as np
import pytest
from real_builders import loaded, random_ids, real_engine, shared_real, submit_ids

from paxserve.device.gap import GapMeter
from paxserve.pack import Variant
from paxserve.step import RowSampling


@pytest.fixture(scope="module")
def meter():
    model = loaded("tiny")
    return GapMeter(model.config, model.parameters, backend="xla")


def test_a_greedy_gap_is_that_of_the_two_best_log_probabilities(meter):
    model = loaded("tiny")
    engine = real_engine(shared_real("tiny"), model)
    engine.executor.warm_up([Variant.LOGPROBS])
    prompt = random_ids(17)
    request = submit_ids(engine, prompt, max_tokens=5, logprobs=2)
    while engine.has_work:
        engine.step()
    assert len(request.sequence.logprobs) == 5
    for position, entry in enumerate(request.sequence.logprobs):
        best, second = entry.top_logprobs
        context = (*prompt, *request.output_token_ids[:position])
        gap = meter.gap(context, num_prompt_tokens=len(prompt), sampling=RowSampling())
        assert gap == pytest.approx(best - second, abs=1e-4)


def test_a_sampled_gap_depends_on_seed_and_position_and_filters(meter):
    prompt = tuple(random_ids(9))

    def gap(num_prompt_tokens=9, **sampling):
        chosen = RowSampling(**({"temperature": 1.0, "seed": 3} | sampling))
        return meter.gap(prompt, num_prompt_tokens=num_prompt_tokens, sampling=chosen)

    assert gap() == gap()
    assert len({gap(), gap(seed=4), gap(num_prompt_tokens=8), gap(temperature=0.0)}) == 4
    assert np.isinf(gap(top_k=1))
    assert gap(top_k=2) > 0
