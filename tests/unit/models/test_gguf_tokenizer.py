"""Tokenizers from GGUF metadata: how each pre-tokenizer splits, and what is refused."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from paxserve.models.gguf_tokenizer import tokenizer_from_gguf

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
MERGES = ["\u0120 1", "1 2", "12 3", "123 4", "L L", "LL x", "a b"]
TOKENS = [
    *sorted(ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    "xyz",
    "<end>",
    "<tool>",
]
TYPES = [NORMAL] * (len(TOKENS) - 2) + [CONTROL, USER_DEFINED]
END, TOOL = len(TOKENS) - 2, len(TOKENS) - 1


def metadata(pre="smollm", **changes):
    base = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TOKENS,
        "merges": MERGES,
        "token_type": TYPES,
        "eos_token_id": END,
    }
    merged = {k: v for k, v in (base | changes).items() if v is not None}
    return {f"tokenizer.ggml.{key}": value for key, value in merged.items()}


def spelled(pre, text):
    tokenizer = tokenizer_from_gguf(metadata(pre))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    return [TOKENS[i] for i in ids]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("gpt-2", "1234", ["1234"]),
        ("smollm", " 12", ["\u0120", "1", "2"]),
        ("gpt-2", " 12", ["\u01201", "2"]),
        ("llama-bpe", " 12", ["\u0120", "12"]),
        ("smollm", "I'LLx", ["I", "'", "LLx"]),
        ("llama-bpe", "I'LLx", ["I", "'", "LL", "x"]),
        ("qwen2", "I'LLx", ["I", "'", "LL", "x"]),
        ("smollm", "xyz", ["x", "y", "z"]),
        ("llama-bpe", "xyz", ["xyz"]),
        ("smollm", "<end>ab<tool>1", ["<end>", "ab", "<tool>", "1"]),
        ("smollm", "\n\n", ["\u010a", "\u010a"]),
    ],
)
def test_how_each_pre_tokenizer_splits(pre, text, expected):
    assert spelled(pre, text) == expected


def test_qwen2_composes_characters():
    tokenizer = tokenizer_from_gguf(metadata("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"
    smollm = tokenizer_from_gguf(metadata("smollm"))
    assert smollm.decode(smollm.encode("e\u0301")) == "e\u0301"


def test_control_tokens_are_special_and_user_defined_are_text():
    tokenizer = tokenizer_from_gguf(metadata())
    assert tokenizer.special_token_ids == {END}
    assert tokenizer.decode([END, TOOL]) == "<tool>"
    assert tokenizer.vocab_size == len(TOKENS)


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("smollm", {"bos_token_id": 5}, []),
        ("smollm", {"bos_token_id": 5, "add_bos_token": True}, [5]),
        ("llama-bpe", {"bos_token_id": 5}, [5]),
        ("llama-bpe", {"bos_token_id": 5, "add_bos_token": False}, []),
        ("llama-bpe", {}, []),
    ],
)
def test_begin_tokens(pre, changes, expected):
    assert tokenizer_from_gguf(metadata(pre, **changes)).encode("") == expected


def test_end_token_is_added_when_asked():
    assert tokenizer_from_gguf(metadata(add_eos_token=True)).encode("") == [END]


def test_all_end_tokens_are_collected_once():
    tokenizer = tokenizer_from_gguf(metadata(eot_token_id=7, eom_token_id=END))
    assert tokenizer.eos_token_ids == (END, 7)


def test_the_template_sees_begin_and_end_tokens():
    template = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    }
    tokenizer = tokenizer_from_gguf(metadata(bos_token_id=TOOL) | template)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.render(messages) == "<tool>ab<end>"
    assert tokenizer.apply_chat_template(messages) == [TOOL, TOKENS.index("ab"), END]


def test_a_file_without_tokenizer_has_none():
    assert tokenizer_from_gguf({"general.architecture": "llama"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"model='llama' is not supported.*tokenizer\.json"),
        ({"pre": "falcon"}, "pre='falcon' is not supported"),
        ({"pre": None}, "pre=None is not supported"),
        ({"pre": ["smollm"]}, "is not supported"),
        ({"tokens": None}, "tokens must be a list of texts"),
        ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, "lists a token twice"),
        ({"merges": ["1"]}, "joins tokens"),
        ({"merges": ["q q"]}, "joins tokens"),
        ({"merges": [5]}, "merges must be a list of texts"),
        ({"token_type": [1]}, "one entry for each"),
        ({"eos_token_id": len(TOKENS)}, "eos_token_id="),
        ({"bos_token_id": -1}, "bos_token_id=-1"),
        ({"bos_token_id": "x"}, "bos_token_id='x'"),
    ],
)
def test_what_is_not_understood_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(metadata(**changes))


def test_a_template_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match="chat_template must be text"):
        tokenizer_from_gguf(metadata() | {"tokenizer.chat_template": 5})
