"""The door: what may not come in, and what a request looks like that did."""

import math

import numpy as np
import pytest
from builders import (
    VOCAB_SIZE,
    Letters,
    greedy,
    make_intake,
    make_limits,
    make_request,
    prompt_ids,
)

from paxserve.intake import InvalidRequest
from paxserve.request import Origin

LETTERS = Letters([b"a", b"b", b"c", b"</s>"])


def make(prompt, *, intake=None, request_id=None, **params):
    prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    return (intake or make_intake()).make(
        prompt, greedy(**params), arrival_s=1.5, request_id=request_id
    )


def refuses(message, prompt, **kwargs):
    with pytest.raises(InvalidRequest, match=message):
        make(prompt, **kwargs)


def test_a_prompt_without_tokens_is_refused():
    refuses("empty", [])
    refuses("empty", "", intake=make_intake(tokenizer=LETTERS))


def test_a_prompt_must_leave_the_model_room_for_one_token():
    limits = make_limits(max_model_len=8)
    assert make(prompt_ids(7), intake=make_intake(limits)).num_prompt_tokens == 7
    message = "has 8 tokens, max_model_len=8 leaves room for at most 7"
    refuses(message, prompt_ids(8), intake=make_intake(limits))
    refuses("has 9 tokens", prompt_ids(9), intake=make_intake(limits))


@pytest.mark.parametrize("length", [31, 32])
def test_a_prompt_that_fills_the_pool_is_let_in(length):
    limits = make_limits(num_blocks=9, block_size=4, max_model_len=100)
    assert make(prompt_ids(length), intake=make_intake(limits)).num_prompt_tokens == length


@pytest.mark.parametrize("length", [33, 34, 99])
def test_a_prompt_beyond_the_pool_is_refused_with_both_numbers(length):
    limits = make_limits(num_blocks=9, block_size=4, max_model_len=100)
    message = rf"has {length} tokens, the KV pool holds 32 \(8 blocks of 4\)"
    refuses(message, prompt_ids(length), intake=make_intake(limits))


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31, 2**70, -(2**31)])
def test_an_id_outside_the_vocabulary_is_refused_by_value(token):
    refuses(f"prompt_token_ids holds {token}, outside .* 0..{VOCAB_SIZE - 1}", [1, token, 2])
    if token >= 0:
        refuses(f"stop_token_ids holds {token}", [1], stop_token_ids=[token])


def test_the_ends_of_the_vocabulary_are_inside():
    request = make([0, VOCAB_SIZE - 1], stop_token_ids=[0, VOCAB_SIZE - 1])
    assert request.prompt_token_ids == (0, VOCAB_SIZE - 1)
    assert request.stop_ids == {0, VOCAB_SIZE - 1}


def test_numpy_ids_become_plain_integers():
    request = make({"prompt_token_ids": np.array([3, 4], np.int32)})
    assert request.prompt_token_ids == (3, 4)
    assert all(type(i) is int for i in request.prompt_token_ids)


@pytest.mark.parametrize("ids", [[1.0], [1, "2"], [None], "12", [[1]], 5, None])
def test_ids_that_are_no_integers_are_refused(ids):
    refuses("must be a list of integers", {"prompt_token_ids": ids})


@pytest.mark.parametrize(
    "prompt",
    [None, 5, (1, 2), {}, {"prompt": 5}, {"prompt": "x", "more": 2}, {"more": "x"}, b"text"],
)
def test_what_is_neither_text_nor_ids_is_refused(prompt):
    refuses("a prompt is a string or", prompt)


def test_text_and_stop_strings_need_a_tokenizer():
    refuses("no tokenizer", "abc")
    refuses("stop strings need", [1], stop="a")
    for text in ("abc", {"prompt": "abc"}):
        request = make(text, intake=make_intake(tokenizer=LETTERS), stop="b")
        assert (request.prompt, request.prompt_token_ids) == ("abc", (0, 1, 2))


def test_text_that_cannot_be_encoded_is_refused_as_a_request():
    refuses("valid Unicode", "a\ud800", intake=make_intake(tokenizer=LETTERS))


def test_end_tokens_are_the_model_s_and_the_request_s_own():
    intake = make_intake(eos_token_ids=(7, 8))
    assert make([1], intake=intake, stop_token_ids=[9]).stop_ids == {7, 8, 9}
    assert make([1], intake=intake, stop_token_ids=[9], ignore_eos=True).stop_ids == {9}
    assert make([1], intake=intake, ignore_eos=True).stop_ids == frozenset()


def test_end_tokens_are_suppressed_only_where_min_tokens_asks():
    intake = make_intake(eos_token_ids=(7, 8))
    assert make([1], intake=intake).sampling.suppressed_ids == ()
    request = make([1], intake=intake, min_tokens=2, stop_token_ids=[8, 9])
    assert request.sampling.suppressed_ids == (8, 9, 7)
    assert request.sampling.min_tokens == 2
    assert make([1], min_tokens=2, stop_token_ids=range(16)).stop_ids == set(range(16))
    refuses("must suppress 17 end tokens, at most 16", [1], min_tokens=2, stop_token_ids=range(17))


def test_length_is_bounded_by_max_tokens_and_by_the_model():
    intake = make_intake(make_limits(max_model_len=10))
    assert make(prompt_ids(4), intake=intake, max_tokens=3).max_known_tokens == 7
    assert make(prompt_ids(4), intake=intake, max_tokens=6).max_known_tokens == 10
    assert make(prompt_ids(4), intake=intake, max_tokens=7).max_known_tokens == 10
    assert make(prompt_ids(4), intake=intake, max_tokens=None).max_known_tokens == 10


@pytest.mark.parametrize(
    ("true", "declared", "num_declared"),
    [(None, None, 5), (5, None, 28), (5, 12, 12), (5, 99, 28), (None, 12, 12)],
)
def test_policies_are_told_what_a_server_would_be_and_not_the_forced_length(
    true, declared, num_declared
):
    """A prompt of 4, a model of 32, and max_tokens of 5, by which a trace forces lengths."""
    origin = Origin(num_true_output_tokens=true, num_declared_output_tokens=declared)
    request = make_request(4, max_tokens=5, origin=origin)
    assert (request.num_declared_tokens, request.max_known_tokens) == (num_declared, 9)


def test_sampling_values_cross_in_their_normal_form():
    sampling = make([1], temperature=1, top_k=-1, top_p=1, min_p=0, seed=5, logprobs=0).sampling
    assert sampling == (1.0, 0, 1.0, 0.0, 5, 0, 0, ())
    assert isinstance(sampling.temperature, float)
    assert make([1]).sampling.num_logprobs == -1
    assert make([1], top_k=4).sampling.top_k == 4


def test_a_derived_seed_depends_on_the_engine_s_seed_and_the_id_alone():
    def seed(request_id, engine_seed=0, num_before=0):
        intake = make_intake(seed=engine_seed)
        for _ in range(num_before):
            make([1], intake=intake)
        return make([1], intake=intake, request_id=request_id).sampling.seed

    assert seed("a") == seed("a", num_before=3)
    assert len({seed(str(i)) for i in range(200)}) == 200
    assert seed("a") != seed("a", engine_seed=1)
    assert 0 <= seed("a") < 2**32


def test_requests_without_an_id_are_numbered():
    intake = make_intake()
    made = [make([1], intake=intake) for _ in range(3)]
    assert [r.request_id for r in made] == ["0", "1", "2"]
    assert [r.arrival_seq for r in made] == [0, 1, 2]
    assert len({r.sequence.sequence_id for r in made}) == 3
    assert made[0].arrival_s == 1.5


def test_the_prompt_is_a_copy():
    ids = prompt_ids(3)
    request = make(ids)
    request.sequence.token_ids.append(1)
    ids[0] = 5
    assert list(request.prompt_token_ids) == prompt_ids(3)
    assert request.num_output_tokens == 1


@pytest.mark.parametrize("arrival_s", [math.nan, math.inf, -math.inf])
def test_an_arrival_that_is_no_time_is_refused(arrival_s):
    with pytest.raises(InvalidRequest, match="arrival_s must be a finite number"):
        make_intake().make({"prompt_token_ids": [1]}, greedy(), arrival_s=arrival_s)


def test_a_refused_request_uses_up_no_id():
    intake = make_intake()
    refuses("empty", [], intake=intake, request_id="x")
    assert make([1], intake=intake, request_id="x").request_id == "x"
    refuses("request id 'x' has been used already", [1], intake=intake, request_id="x")


@pytest.mark.parametrize("request_id", ["", "\ud800", 5])
def test_an_id_that_is_no_text_is_refused(request_id):
    refuses("a request id must be a text", [1], intake=make_intake(), request_id=request_id)
