from builders import Letters, greedy, make_intake

from paxserve.request import FinishReason, State
from paxserve.texts import Texts

NI = "\u4f60"
PIECES = [b"a", b"b", b"c", *[bytes([b]) for b in NI.encode()], b" ", b"</s>"]
A, B, C, N1, N2, N3, SPACE, END = range(8)
TOKENIZER = Letters(PIECES)


def opened(tokenizer=TOKENIZER, **params):
    intake = make_intake(tokenizer=TOKENIZER)
    request = intake.make({"prompt_token_ids": [A]}, greedy(**params), arrival_s=0.0)
    texts = Texts(tokenizer)
    return texts, request


def grow(texts, request, *tokens):
    request.sequence.token_ids.extend(tokens)
    return texts.advance(request, request.sequence)


def end(request, reason=FinishReason.LENGTH):
    request.state, request.finish_reason = State.FINISHED, reason
    request.sequence.finish_reason = reason


def test_deltas_join_to_the_text():
    texts, request = opened()
    deltas = []
    for token in (A, N1, N2, N3, SPACE, B):
        grow(texts, request, token)
        deltas.append(texts.delta(request, request.sequence))
    end(request)
    texts.advance(request, request.sequence)
    deltas.append(texts.delta(request, request.sequence))
    assert [d.text for d in deltas] == ["a", "", "", NI, " ", "b", ""]
    assert [d.token_ids for d in deltas] == [(A,), (N1,), (N2,), (N3,), (SPACE,), (B,), ()]
    assert [d.finished for d in deltas] == [False] * 6 + [True]
    assert deltas[-1].finish_reason == "length"
    assert texts.text(request.sequence) == f"a{NI} b"


def test_a_delta_is_given_once():
    texts, request = opened()
    grow(texts, request, A, B)
    assert texts.delta(request, request.sequence).text == "ab"
    again = texts.delta(request, request.sequence)
    assert (again.text, again.token_ids) == ("", ())
    assert texts.text(request.sequence) == "ab"


def test_half_a_character_is_shown_as_replacement_at_the_end_and_once():
    texts, request = opened()
    grow(texts, request, A, N1)
    assert texts.text(request.sequence) == "a"
    end(request)
    texts.advance(request, request.sequence)
    assert texts.text(request.sequence) == "a\ufffd"
    texts.advance(request, request.sequence)
    assert texts.text(request.sequence) == "a\ufffd"


def test_a_stop_string_over_several_tokens_is_found_cut_and_named():
    texts, request = opened(stop=["bc"])
    assert grow(texts, request, A, B) is None
    assert texts.text(request.sequence) == "a"  # b may be the beginning of the stop
    assert grow(texts, request, C) == "bc"
    assert texts.text(request.sequence) == "a"
    assert texts.delta(request, request.sequence).token_ids == (A, B, C)


def test_a_stop_string_may_be_kept():
    texts, request = opened(stop=["bc"], include_stop_str_in_output=True)
    assert grow(texts, request, A, B, C) == "bc"
    assert texts.text(request.sequence) == "abc"


def test_what_was_held_for_a_stop_that_did_not_come_is_shown_at_the_end():
    texts, request = opened(stop=["bc"])
    grow(texts, request, B)
    end(request)
    assert texts.advance(request, request.sequence) is None
    assert texts.text(request.sequence) == "b"


def test_an_end_token_is_no_text_even_if_it_is_not_special():
    texts, request = opened(stop_token_ids=[C])
    request.sequence.token_ids.extend([A, C])
    end(request, FinishReason.STOP)
    texts.advance(request, request.sequence)
    assert texts.text(request.sequence) == "a"


def test_the_same_token_is_text_where_it_did_not_end_the_request():
    texts, request = opened(stop_token_ids=[C], min_tokens=4)
    grow(texts, request, C, A)
    request.sequence.token_ids.extend([B])
    end(request, FinishReason.LENGTH)
    texts.advance(request, request.sequence)
    assert texts.text(request.sequence) == "cab"


def test_special_tokens_are_left_out_unless_asked_for():
    for skip, expected in ((True, "ab"), (False, "a</s>b")):
        texts, request = opened(skip_special_tokens=skip)
        grow(texts, request, A, END, B)
        assert texts.text(request.sequence) == expected


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    texts, request = opened(tokenizer=None)
    assert grow(texts, request, A, B) is None
    delta = texts.delta(request, request.sequence)
    assert (delta.text, delta.token_ids) == ("", (A, B))
    assert texts.text(request.sequence) == ""


def test_requests_with_one_id_in_turn_keep_their_own_texts():
    texts, first = opened()
    grow(texts, first, A)
    end(first)
    second = make_intake().make({"prompt_token_ids": [A]}, greedy(), arrival_s=0.0)
    assert second.request_id == first.request_id
    grow(texts, second, B)
    assert (texts.text(first.sequence), texts.text(second.sequence)) == ("a", "b")
