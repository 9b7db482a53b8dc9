"""Streaming: pieces join to the full decode, and stops cut the same however text is split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import byte_level_backend, sentencepiece_backend

from paxserve.models.text_stream import TextStream
from paxserve.models.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(byte_level_backend(), decoding="byte_level")
SENTENCEPIECE = Tokenizer(
    sentencepiece_backend(), decoding="sentencepiece", strips_first_space=True
)
TOKENIZERS = st.sampled_from([BYTE_LEVEL, SENTENCEPIECE])
UNICODE = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
FEW = st.text(alphabet="ab \u4f60\U0001f600", max_size=14)  # few letters, so stops do occur


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The token that stands for one byte."""
    return next(
        i
        for i in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(i) == bytes([byte]) and i not in tokenizer.special_token_ids
    )


BYTE_IDS = {id(t): [byte_id(t, byte) for byte in range(256)] for t in (BYTE_LEVEL, SENTENCEPIECE)}


def byte_tokens(tokenizer: Tokenizer, content: bytes) -> list[int]:
    return [BYTE_IDS[id(tokenizer)][byte] for byte in content]


def drain(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.feed(token_id) for token_id in ids), stream.finish()]


def earliest_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By brute force: the first position where a stop is complete, and the longest there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(TOKENIZERS, st.data(), st.booleans())
def test_any_ids_join_to_the_full_decode(tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    pieces = drain(TextStream(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(TOKENIZERS, UNICODE)
def test_any_text_split_into_single_bytes_never_shows_half_a_character(tokenizer, text):
    pieces = drain(TextStream(tokenizer), byte_tokens(tokenizer, text.encode()))
    expected = text.removeprefix(" ") if tokenizer is SENTENCEPIECE else text
    assert "".join(pieces) == expected
    assert all(piece.count("\ufffd") == expected.count("\ufffd") == 0 for piece in pieces) or (
        "\ufffd" in text
    )


@given(TOKENIZERS, st.binary(max_size=24))
def test_any_bytes_join_to_the_full_decode(tokenizer, content):
    ids = byte_tokens(tokenizer, content)
    pieces = drain(TextStream(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@given(UNICODE, st.data())
def test_mixed_splits_of_encoded_text(text, data):
    """Some tokens whole, some spelled byte by byte."""
    ids = []
    for token_id in BYTE_LEVEL.encode(text):
        whole = data.draw(st.booleans()) or token_id in BYTE_LEVEL.special_token_ids
        ids += [token_id] if whole else byte_tokens(BYTE_LEVEL, BYTE_LEVEL.token_bytes(token_id))
    pieces = drain(TextStream(BYTE_LEVEL, skip_special_tokens=False), ids)
    assert "".join(pieces) == text


def test_a_character_appears_with_its_last_byte():
    stream = TextStream(BYTE_LEVEL)
    ids = byte_tokens(BYTE_LEVEL, "\U0001f600!".encode())
    assert [stream.feed(i) for i in ids] == ["", "", "", "\U0001f600", "!"]


def test_invalid_bytes_do_not_block_what_follows():
    stream = TextStream(BYTE_LEVEL)
    ids = byte_tokens(BYTE_LEVEL, b"\xff" + b"a" + b"\xe4\xbd" + b"b" + b"\x80" * 3)
    assert [stream.feed(i) for i in ids] == ["\ufffd", "a", "", "", "\ufffdb", *"\ufffd" * 3]


def test_finish_replaces_an_unfinished_character():
    stream = TextStream(BYTE_LEVEL)
    assert [stream.feed(i) for i in byte_tokens(BYTE_LEVEL, b"a\xf0\x9f")] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_sentencepiece_drops_only_the_first_space():
    the = SENTENCEPIECE._backend.token_to_id("\u2581the")
    stream = TextStream(SENTENCEPIECE)
    assert [stream.feed(the), stream.feed(the), stream.finish()] == ["the", " the", ""]


@pytest.mark.parametrize(("skip", "expected"), [(True, ["a", ""]), (False, ["a", "</s>"])])
def test_special_tokens(skip, expected):
    ids = BYTE_LEVEL.encode("a</s>")
    stream = TextStream(BYTE_LEVEL, skip_special_tokens=skip)
    assert [stream.feed(i) for i in ids] == expected


@settings(max_examples=400)
@given(
    TOKENIZERS,
    FEW,
    st.lists(FEW.filter(bool), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_stops_cut_exactly_for_every_split(tokenizer, text, stops, include, by_bytes):
    ids = byte_tokens(tokenizer, text.encode()) if by_bytes else tokenizer.encode(text)
    full = tokenizer.decode(ids)
    found = earliest_stop(full, stops)
    stream = TextStream(tokenizer, stop=stops, include_stop=include)
    pieces = drain(stream, ids)
    if found is None:
        assert ("".join(pieces), stream.matched_stop) == (full, None)
    else:
        end, stop = found
        assert stream.matched_stop == stop
        assert "".join(pieces) == full[: end if include else end - len(stop)]


@given(FEW, st.lists(FEW.filter(bool), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop(text, stops):
    stream, shown, fed = TextStream(BYTE_LEVEL, stop=stops), "", ""
    for char in text:
        for token_id in byte_tokens(BYTE_LEVEL, char.encode()):
            shown += stream.feed(token_id)
        fed += char
        if stream.matched_stop is not None:
            return
        held = fed[len(shown) :]
        prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((p for p in prefixes if fed.endswith(p)), key=len, default="")
        assert held == longest


def test_a_stop_across_tokens_leaks_nothing():
    stream = TextStream(BYTE_LEVEL, stop=["END."])
    ids = byte_tokens(BYTE_LEVEL, b"aEN bEND.c")
    assert [stream.feed(i) for i in ids] == ["a", "", "", "EN ", "b", "", "", "", "", ""]
    assert stream.matched_stop == "END."
    assert stream.finish() == ""


def test_a_stop_inside_one_token_cuts_it():
    the = SENTENCEPIECE._backend.token_to_id("\u2581the")
    stream = TextStream(SENTENCEPIECE, stop=["h"])
    assert (stream.feed(the), stream.matched_stop) == ("t", "h")
    stream = TextStream(SENTENCEPIECE, stop=["h"], include_stop=True)
    assert (stream.feed(the), stream.matched_stop) == ("th", "h")


def test_what_is_held_is_given_at_the_end():
    stream = TextStream(BYTE_LEVEL, stop=["END"])
    assert [stream.feed(i) for i in byte_tokens(BYTE_LEVEL, b"xEN")] == ["x", "", ""]
    assert (stream.finish(), stream.matched_stop) == ("EN", None)


def test_the_flush_passes_the_stop_filter():
    """The last character only exists once the unfinished bytes are replaced."""
    for include, expected in ((False, "x"), (True, "x\ufffd")):
        stream = TextStream(BYTE_LEVEL, stop=["\ufffd"], include_stop=include)
        ids = byte_tokens(BYTE_LEVEL, b"x\xf0\x9f")
        text = "".join(stream.feed(i) for i in ids)
        assert (text + stream.finish(), stream.matched_stop) == (expected, "\ufffd")


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["ab", "abc"], "xabc", "x", "ab"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["c", "bc"], "abc", "a", "bc"),
        (["aab"], "aaab", "a", "aab"),
        (["abab c"], "ababab c", "ab", "abab c"),
    ],
)
def test_which_stop_wins(stops, text, shown, matched):
    stream = TextStream(BYTE_LEVEL, stop=stops)
    pieces = drain(stream, byte_tokens(BYTE_LEVEL, text.encode()))
    assert ("".join(pieces), stream.matched_stop) == (shown, matched)


@pytest.mark.parametrize("stop", ["x", [""], ["a", ""], [1], [None]])
def test_malformed_stops_are_refused(stop):
    with pytest.raises(ValueError, match="stop must be a list of non-empty texts"):
        TextStream(BYTE_LEVEL, stop=stop)


def test_work_per_character_does_not_grow_with_the_stop():
    """A stop built to be half matched again and again: steps, not time, are counted."""
    stream = TextStream(BYTE_LEVEL, stop=["a" * 5000 + "b"])
    ids = byte_tokens(BYTE_LEVEL, b"a" * 6000)
    text = "".join(stream.feed(i) for i in ids)
    assert text == "a" * 1000
    assert stream.finish() == "a" * 5000
