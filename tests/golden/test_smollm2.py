"""SmolLM2-135M-Instruct gives the tokens of transformers, however its requests are scheduled.

The reference was made in float32 by greedy decoding; the smallest gap of the two best logits along
any path is 6e-3, so every token must be equal. `chat-*` and `long-*` are the project's own; the
`sharegpt-*` prompts are read from PAXSERVE_DATA, where it is set.
"""

import numpy as np
import pytest
from builders import run_to_end
from invariants import check_idle
from numpy_beams import beam_search
from real_builders import golden_entries, loaded, real_engine, shared_real, submit_ids

from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.placement.first_fit import FirstFit
from paxserve.reservation.max import Max

NAME = "smollm2-135m"
CHATS = tuple(f"chat-{i}" for i in range(6))
LONGS = ("long-0", "long-1")
SHARED = tuple(f"sharegpt-{i}" for i in range(10))
LOGIT_TOLERANCE = 2e-4


def entries(*names):
    found = {name: entry for name, entry in golden_entries().items() if name in names}
    assert sorted(found) == sorted(names)
    return found


def reference(entry, most=None):
    return entry["greedy_token_ids"][:most]


def serve(names, *, most=None, policies=None, logprobs=None, **sizes):
    """Serve these entries together, in this order; the engine and the requests by entry."""
    model = loaded(NAME)
    engine = real_engine(shared_real(NAME), model, policies=policies, **sizes)
    requests = {
        name: submit_ids(
            engine,
            entries(name)[name]["prompt_token_ids"],
            max_tokens=len(reference(entries(name)[name], most)),
            ignore_eos=entries(name)[name]["ignore_eos"],
            logprobs=logprobs,
            skip_special_tokens=False,
        )
        for name in names
    }
    run_to_end(engine)
    check_idle(engine)
    return engine, requests


def assert_same_tokens(requests, most=None):
    for name, request in requests.items():
        expected = reference(golden_entries()[name], most)
        assert list(request.output_token_ids) == expected, name


def assert_first_logits(request, entry):
    """logprob = logit - logsumexp, and the reference has both."""
    top, found = entry["first_position_top20"], request.sequence.logprobs[0]
    assert list(found.top_ids) == top["token_ids"]
    expected = np.array(top["logits"]) - top["logsumexp"]
    np.testing.assert_allclose(found.top_logprobs, expected, atol=LOGIT_TOLERANCE, rtol=0)
    assert found.rank == 1
    assert found.logprob == found.top_logprobs[0]


def test_all_entries_in_one_mixed_batch():
    names = (*LONGS, *CHATS, *(name for name in SHARED if name in golden_entries()))
    engine, requests = serve(names, logprobs=20, max_num_batched_tokens=512)
    assert_same_tokens(requests)
    for name, request in requests.items():
        entry = golden_entries()[name]
        assert_first_logits(request, entry)
        output = engine.output(request).outputs[0]
        # An end token that ended the request is no part of its text.
        text = entry["text"] if entry["ignore_eos"] else entry["text"].removesuffix("<|im_end|>")
        assert output.text == text, name
        is_stopped = reference(entry)[-1] == 2 and not entry["ignore_eos"]
        assert (output.finish_reason, output.stop_reason) == (
            ("stop", None) if is_stopped else ("length", None)
        )
    assert any(step.num_rows == 8 and 8 < step.num_tokens <= 512 for step in engine.steps)


def test_the_sharegpt_entries_are_there_with_the_data():
    if "sharegpt-0" not in golden_entries():
        pytest.skip("PAXSERVE_DATA is not set: no sharegpt entries")
    assert len(entries(*CHATS, *LONGS, *SHARED)) == len(golden_entries()) == 18


@pytest.mark.parametrize("budget", [8, 16, 64])
def test_chunk_sizes(budget):
    engine, requests = serve(CHATS[:4], most=12, max_num_batched_tokens=budget)
    assert_same_tokens(requests, most=12)
    assert max(step.num_tokens for step in engine.steps) == budget


@pytest.mark.parametrize("chunk", [1, 7])
def test_smallest_chunks(chunk):
    """The budget of a host with one row, or with as many rows as tokens."""
    names = ("chat-0",) if chunk == 1 else ("chat-5", "chat-0")
    rows = {"max_num_seqs": 1 if chunk == 1 else 2}
    engine, requests = serve(names, most=8, max_num_batched_tokens=max(chunk, 1), **rows)
    assert_same_tokens(requests, most=8)
    assert max(step.num_tokens for step in engine.steps) == chunk


@pytest.mark.parametrize(
    "policies",
    [
        {"batching": Textbook()},
        {"batching": Static(), "reservation": Max(), "placement": FirstFit()},
        {"batching": Static()},
    ],
    ids=["textbook", "static-max-first_fit", "static-on_demand-paged"],
)
def test_batching_policies(policies):
    engine, requests = serve(
        CHATS, most=24, policies=policies, max_model_len=144, max_num_batched_tokens=256,
        max_num_seqs=4,
    )  # fmt: skip
    assert_same_tokens(requests, most=24)
    assert max(step.num_tokens for step in engine.steps) > 64


@pytest.mark.parametrize("batching", [None, Textbook()], ids=["chunked_prefill", "textbook"])
def test_tiny_pools_preempt_and_change_nothing(batching):
    policies = {} if batching is None else {"batching": batching}
    _, requests = serve(
        ("chat-2", "chat-3", "chat-4", "chat-1"), most=32, policies=policies, num_blocks=1 + 12,
        max_model_len=128, max_num_batched_tokens=128,
    )  # fmt: skip
    assert_same_tokens(requests, most=32)
    assert sum(request.num_preemptions for request in requests.values()) >= 2
    assert sum(request.num_recomputed_tokens for request in requests.values()) > 80


def test_another_order_and_company():
    _, requests = serve(
        ("chat-4", "chat-1", "chat-5", "chat-0"), most=24, max_num_seqs=2,
        max_num_batched_tokens=64,
    )  # fmt: skip
    assert_same_tokens(requests, most=24)


@pytest.mark.parametrize(("width", "num_tokens"), [(2, 6), (4, 4)])
def test_beams_are_those_of_numpy(width, num_tokens):
    """With the model's end token, beside a greedy request that goes on as ever."""
    model, ids = loaded(NAME), entries("chat-0")["chat-0"]["prompt_token_ids"]
    expected = beam_search(
        model, ids, width=width, num_tokens=num_tokens, stop_ids=frozenset({2})
    )  # fmt: skip
    assert expected.margin > 1e-3
    engine = real_engine(shared_real(NAME), model, max_num_batched_tokens=64)
    chat = entries("chat-4")["chat-4"]
    greedy = submit_ids(engine, chat["prompt_token_ids"], max_tokens=10)
    beams = submit_ids(
        engine, ids, max_tokens=num_tokens, beam_width=width, ignore_eos=False
    )  # fmt: skip
    run_to_end(engine)
    check_idle(engine)
    found = [tuple(beams.output_of(sequence)) for sequence in beams.sequences]
    assert found == [beam.tokens for beam in expected.beams]
    np.testing.assert_allclose(
        [sequence.cumulative_logprob for sequence in beams.sequences],
        [beam.cumulative_logprob for beam in expected.beams],
        atol=LOGIT_TOLERANCE * num_tokens,
        rtol=0,
    )
    assert list(greedy.output_token_ids) == reference(chat, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies",
    [{"batching": Textbook()}, {"batching": Static(), "reservation": Max()}],
    ids=["textbook", "static-max"],
)
def test_long_prompts_whole(policies):
    names = ("long-0", "long-1", "chat-0", "chat-4")
    engine, requests = serve(names, policies=policies)
    assert_same_tokens(requests)
    assert max(step.num_tokens for step in engine.steps) >= 3984


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 512])
def test_long_prompts_in_other_chunks_with_preemption(budget):
    _, requests = serve(
        ("chat-2", "long-1", "long-0", "chat-3"), num_blocks=1 + 255, max_num_batched_tokens=budget
    )
    assert_same_tokens(requests)
    assert sum(request.num_preemptions for request in requests.values()) >= 1
