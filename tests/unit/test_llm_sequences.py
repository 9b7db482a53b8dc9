"""`LLM` with several sequences per request: samples, beams, their texts and streams; and the
settings that share and move their blocks.

On `tiny`, whose 512 ids stand for letters here; one that beams come across ends a text.
"""

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
from builders import Letters
from numpy_beams import beam_search
from real_builders import keep_compiled_programs, loaded, random_ids

from paxserve import LLM, BeamSearchParams, SamplingParams, llm
from paxserve.experiment import Run
from paxserve.intake import InvalidRequest, seed_of_sample
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.none import NoCache
from paxserve.results import write_results

SIZES = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "row_buckets": (4,),
    "token_buckets": (128,),
}
ENDLESS = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, max_tokens=8, seed=3)
IDS = random_ids(19)
TEXT = "".join(chr(0x100 + i) for i in IDS)


@cache
def end_token():
    """The second token of the best beam."""
    return numpy_beams(2).beams[0].tokens[1]


def numpy_beams(width, **options):
    return beam_search(loaded("tiny"), IDS, width=width, num_tokens=6, **options)


def lettered(name, **options):
    """`tiny` with a tokenizer, and an end token."""
    model = loaded(name)
    config = dataclasses.replace(model.config, eos_token_ids=(end_token(),))
    letters = Letters([chr(0x100 + i).encode() for i in range(512)])
    return dataclasses.replace(model, config=config, tokenizer=letters)


def make_llm(**options):
    keep_compiled_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "load_model", lettered)
        return LLM("tiny", **(SIZES | options))


@cache
def tiny():
    return make_llm()


def prompt(num_tokens, seed=0):
    return {"prompt_token_ids": random_ids(num_tokens, seed=seed)}


def tokens_of(output):
    return [completion.token_ids for completion in output.outputs]


# Samples.


def test_each_of_n_samples_is_that_of_a_request_with_its_seed():
    (output,) = tiny().generate(TEXT, dataclasses.replace(RANDOM, n=4))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in tokens_of(output)}) == 4
    for i, completion in enumerate(output.outputs):
        alone = dataclasses.replace(RANDOM, seed=seed_of_sample(3, i))
        (expected,) = tiny().generate(TEXT, alone)
        assert dataclasses.replace(completion, index=0) == expected.outputs[0]
        assert completion.text == tiny().tokenizer.decode(completion.token_ids)
        assert completion.cumulative_logprob is None


def test_samples_have_log_probabilities_of_their_own():
    params = dataclasses.replace(RANDOM, n=3, logprobs=2)
    (output,) = tiny().generate(TEXT, params)
    for completion in output.outputs:
        positions = zip(completion.token_ids, completion.logprobs, strict=True)
        chosen = [logprobs[token].logprob for token, logprobs in positions]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        assert max(chosen) < 0
    assert len({completion.cumulative_logprob for completion in output.outputs}) == 3


def test_samples_end_each_for_itself():
    """The third token of the first sample is a stop string: it ends, the others go on."""
    (plain,) = tiny().generate(TEXT, dataclasses.replace(RANDOM, n=3))
    first = plain.outputs[0]
    stop = first.text[2]
    assert all(stop not in other.text for other in plain.outputs[1:])
    (output,) = tiny().generate(TEXT, dataclasses.replace(RANDOM, n=3, stop=stop))
    ended, *others = output.outputs
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert (ended.text, ended.token_ids) == (first.text[:2], first.token_ids[:3])
    assert others == plain.outputs[1:]
    stop_id = first.token_ids[2]
    (output,) = tiny().generate(TEXT, dataclasses.replace(RANDOM, n=3, stop_token_ids=[stop_id]))
    assert output.outputs[0].stop_reason == stop_id
    assert output.outputs[0].text == first.text[:2]
    assert output.outputs[1:] == plain.outputs[1:]


def test_deltas_of_samples_join_to_their_outputs():
    params = dataclasses.replace(RANDOM, n=3)
    (expected,) = tiny().generate(TEXT, params)
    stop = expected.outputs[1].text[4]
    (expected,) = tiny().generate(TEXT, dataclasses.replace(params, stop=stop))
    deltas = list(tiny().stream(TEXT, dataclasses.replace(params, stop=stop)))
    for completion in expected.outputs:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in own) == completion.text
        assert [t for delta in own for t in delta.token_ids] == completion.token_ids
        assert [delta.finished for delta in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == completion.finish_reason
    assert [delta.index for delta in deltas[:3]] == [0, 1, 2]


def test_more_samples_than_rows_are_refused():
    with pytest.raises(InvalidRequest, match="5 sequences do not fit max_num_seqs=4 rows"):
        tiny().generate(TEXT, dataclasses.replace(RANDOM, n=5))


# Beams.


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beams_are_those_of_numpy(width, length_penalty):
    expected = numpy_beams(width, stop_ids=frozenset({end_token()}), length_penalty=length_penalty)
    plain = numpy_beams(width)
    assert min(plain.margin, expected.margin) > 1e-3
    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=length_penalty)
    (output,) = tiny().beam_search(TEXT, params)
    assert [tuple(s.tokens[19:]) for s in output.sequences] == [b.tokens for b in expected.beams]
    np.testing.assert_allclose(
        [s.cum_logprob for s in output.sequences],
        [beam.cumulative_logprob for beam in expected.beams],
        atol=1e-4,
        rtol=0,
    )
    assert "stop" in {sequence.finish_reason for sequence in output.sequences}
    ignoring = dataclasses.replace(params, ignore_eos=True, length_penalty=1.0)
    (output,) = tiny().beam_search(TEXT, ignoring)
    assert [tuple(s.tokens[19:]) for s in output.sequences] == [b.tokens for b in plain.beams]
    assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


def test_beam_outputs_are_shaped_as_vllm_s():
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    first, wrong, last = tiny().beam_search([TEXT, prompt(0), prompt(7)], params)
    assert [len(output.sequences) for output in (first, wrong, last)] == [3, 0, 3]
    assert "the prompt is empty" in wrong.error
    assert first.error is last.error is None
    for sequence in first.sequences:
        assert sequence.tokens[:19] == IDS
        assert sequence.text == tiny().tokenizer.decode(sequence.tokens)
        assert sequence.text.startswith(TEXT)
        assert len(sequence.tokens) == 19 + 4
    scores = [sequence.cum_logprob for sequence in first.sequences]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        tiny().beam_search(prompt(0), params)


def test_generate_takes_beams_too_and_their_stream_comes_at_the_end():
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    (expected,) = tiny().beam_search(TEXT, params)
    (output,) = tiny().generate(TEXT, params.sampling_params)
    assert [c.token_ids for c in output.outputs] == [s.tokens[19:] for s in expected.sequences]
    deltas = list(tiny().stream(TEXT, params.sampling_params))
    assert [delta.index for delta in deltas] == [0, 1]
    assert [list(delta.token_ids) for delta in deltas] == tokens_of(output)
    assert [delta.text for delta in deltas] == [c.text for c in output.outputs]
    assert all(delta.finished for delta in deltas)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0, "max_tokens": 3}, "beam_width must be an integer from 1 to 10, got 0"),
        ({"beam_width": 11, "max_tokens": 3}, "beam_width must be .* got 11"),
        ({"beam_width": True, "max_tokens": 3}, "beam_width must be .* got True"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"beam_width": 2, "max_tokens": 3, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 3, "ignore_eos": 1}, "ignore_eos must be true or false"),
    ],
)
def test_wrong_beam_search_params(values, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**values)


# What is shared, kept and moved.


def test_prefix_caching_is_a_flag():
    cached, plain = make_llm(enable_prefix_caching=True), tiny()
    assert isinstance(cached.engine.scheduler.policies.prefix_cache, HashChain)
    assert isinstance(plain.engine.scheduler.policies.prefix_cache, NoCache)
    params = dataclasses.replace(RANDOM, n=2)
    (expected,) = plain.generate(prompt(50), params)
    outputs = [cached.generate(prompt(50), params)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 48]
    assert [tokens_of(output) for output in outputs] == [tokens_of(expected)] * 2
    assert expected.num_cached_tokens == 0
    with pytest.raises(ValueError, match="prefix_cache and enable_prefix_caching both say"):
        make_llm(prefix_cache="radix", enable_prefix_caching=True)


def test_nothing_compiles_after_warm_up_with_copies_swaps_samples_and_beams():
    tight = make_llm(
        preemption="swap", swap_space_gib=0.001, num_blocks_override=10, preempt_every_steps=2,
        enable_prefix_caching=True,
    )  # fmt: skip
    assert isinstance(tight.engine.scheduler.policies.preemption, Swap)
    bytes_per_block = sum(kv[0].nbytes for kv in tight.engine.executor.kv_blocks)
    assert tight.engine.limits.num_host_blocks == int(0.001 * 2**30) // bytes_per_block
    params = [
        dataclasses.replace(RANDOM, n=4),
        BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True).sampling_params,
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    ]
    prompts = [prompt(20, seed=i) for i in range(3)]
    expected = tiny().generate(prompts * 2, params * 2)
    outputs = tight.generate(prompts * 2, params * 2)
    assert tight.engine.executor.strict
    steps = tight.engine.steps
    assert sum(step.num_compiles for step in steps) == 0
    assert sum(step.num_copied for step in steps) > 0
    assert sum(step.num_swapped_in for step in steps) > 0
    assert sum(step.swap_bytes for step in steps) == bytes_per_block * sum(
        step.num_swapped_in + step.num_swapped_out for step in steps
    )
    assert sum(step.num_cached_tokens for step in steps) > 0
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption": "swap"}, "no host blocks: set limits.swap_space_gib"),
        ({"swap_space_gib": 0.01}, "swap_space_gib=0.01 is not used by preemption Recompute"),
        (
            {"preemption": "swap", "swap_space_gib": 10.0**6},
            r"the host pool of 1000000.00 GiB does not fit: the host has \d+.\d\d GiB available, "
            r"of which the device's pool takes 0.00 GiB: lower swap_space_gib",
        ),
    ],
)
def test_swap_space_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(**options)


def test_saved_outputs_hold_every_sequence(tmp_path):
    fresh = make_llm()
    (sampled,) = fresh.generate(TEXT, dataclasses.replace(RANDOM, n=3))
    (beams,) = fresh.beam_search(TEXT, ENDLESS)
    run = Run(
        engine=fresh.engine, refused=[], summary={}, warm_up_s=0.0, num_executables=0, device="cpu"
    )
    write_results(run, tmp_path, config={})
    lines = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    texts = [[line["text"], *[other["text"] for other in line["others"]]] for line in lines]
    assert texts[0] == [completion.text for completion in sampled.outputs]
    ids = [line["token_ids"] for line in (lines[0], *lines[0]["others"])]
    assert ids == [completion.token_ids for completion in sampled.outputs]
    assert [TEXT + text for text in texts[1]] == [s.text for s in beams.sequences]
    scores = [lines[1]["cumulative_logprob"], lines[1]["others"][0]["cumulative_logprob"]]
    assert scores == [sequence.cum_logprob for sequence in beams.sequences]
    assert "cumulative_logprob" not in lines[0]
