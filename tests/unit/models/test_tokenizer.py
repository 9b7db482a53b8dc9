"""Encoding, decoding by bytes, begin tokens, and reading a directory's files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import byte_level_backend, sentencepiece_backend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from paxserve.models.tokenizer import Tokenizer
from paxserve.models.tokenizer_json import read_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_backend(), decoding="byte_level")
SENTENCEPIECE = Tokenizer(
    sentencepiece_backend(), decoding="sentencepiece", strips_first_space=True
)


def write(directory, backend, config=None, template=None):
    backend.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def with_bos(backend):
    """The post-processor Llama 3 carries: a begin token before every text."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_byte_level_text_survives_and_equals_the_library(text):
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text
    backend = BYTE_LEVEL._backend
    assert backend.decode(ids, skip_special_tokens=False) == text or "\u2603word" in text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_sentencepiece_text_survives_and_equals_the_library(text):
    ids = SENTENCEPIECE.encode(text)
    assert SENTENCEPIECE.decode(ids, skip_special_tokens=False) == text
    assert SENTENCEPIECE._backend.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("\u0120", b" "),
        ("\u010a", b"\n"),
        ("!", b"!"),
        ("\u00e4", b"\xe4"),
        ("\u0100", b"\x00"),
        ("<s>", b"<s>"),
        ("\u2603word", "\u2603word".encode()),
    ],
)
def test_bytes_of_byte_level_tokens(token, expected):
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL._backend.token_to_id(token)) == expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("\u2581the", b" the"),
        ("<0x0A>", b"\n"),
        ("<0xE4>", b"\xe4"),
        ("\u4f60", "\u4f60".encode()),
        ("</s>", b"</s>"),
    ],
)
def test_bytes_of_sentencepiece_tokens(token, expected):
    assert SENTENCEPIECE.token_bytes(SENTENCEPIECE._backend.token_to_id(token)) == expected


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_ids_without_a_token_stand_for_nothing(token_id):
    assert BYTE_LEVEL.token_bytes(token_id) == b""
    assert BYTE_LEVEL.decode([token_id]) == ""


def test_special_tokens_are_skipped_only_when_asked():
    ids = BYTE_LEVEL.encode("a</s>b\u2603word")
    assert BYTE_LEVEL.decode(ids) == "ab\u2603word"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "a</s>b\u2603word"
    assert BYTE_LEVEL.special_token_ids == {305, 306}


def test_bytes_that_are_not_utf8_become_replacement_characters():
    ids = [BYTE_LEVEL._backend.token_to_id(token) for token in ("\u00e4", "!", "\u00bd")]
    assert BYTE_LEVEL.decode(ids) == "\ufffd!\ufffd"


def test_only_one_leading_space_is_stripped():
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode("  the")) == "  the"
    assert SENTENCEPIECE.decode([]) == ""


def test_vocab_size_counts_added_tokens():
    assert BYTE_LEVEL.vocab_size == 308


@pytest.mark.parametrize("text", ["\ud800", 5, None, ["a"], b"a"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(ValueError, match="text must be a string of valid Unicode"):
        BYTE_LEVEL.encode(text)


@pytest.mark.parametrize(
    ("config", "has_bos"),
    [
        (TOKENS, True),
        (TOKENS | {"add_bos_token": True}, True),
        (TOKENS | {"add_bos_token": False}, False),
    ],
)
def test_the_post_processor_decides_unless_the_config_says(tmp_path, config, has_bos):
    tokenizer = read_tokenizer(write(tmp_path, with_bos(byte_level_backend()), config))
    plain = tokenizer.encode("The cat", add_special_tokens=False)
    assert tokenizer.encode("The cat") == ([305] if has_bos else []) + plain
    assert tokenizer.bos_token_id == 305
    assert tokenizer.eos_token_ids == (306,)


def test_config_adds_bos_and_eos_that_the_post_processor_lacks(tmp_path):
    config = TOKENS | {"add_bos_token": True, "add_eos_token": True}
    tokenizer = read_tokenizer(write(tmp_path, byte_level_backend(), config))
    ids = tokenizer.encode("The cat")
    assert (ids[0], ids[-1]) == (305, 306)
    assert tokenizer.decode(ids) == "The cat"


def test_a_text_that_starts_with_the_begin_token_gets_no_second_one(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path, with_bos(byte_level_backend()), TOKENS))
    assert tokenizer.encode("<s>The cat").count(305) == 1
    assert tokenizer.encode("<s>The cat") == tokenizer.encode("The cat")


def test_a_templated_prompt_has_the_templates_begin_token_only(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = read_tokenizer(write(tmp_path, with_bos(byte_level_backend()), TOKENS, template))
    messages = [{"role": "user", "content": "The cat"}]
    assert tokenizer.render(messages) == "<s>The cat</s>"
    ids = tokenizer.apply_chat_template(messages)
    assert ids == [305, *tokenizer.encode("The cat", add_special_tokens=False), 306]
    assert tokenizer.encode(tokenizer.render(messages)) == ids


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ({"chat_template": "one"}, None, "one"),
        ({"chat_template": "one"}, "file", "file"),
        ({}, "file", "file"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "plain"},
                ]
            },
            None,
            "plain",
        ),
    ],
)
def test_where_the_chat_template_is_found(tmp_path, config, file, expected):
    tokenizer = read_tokenizer(write(tmp_path, byte_level_backend(), config, file))
    assert tokenizer.render([{"role": "user", "content": "x"}]) == expected


def test_without_a_template_messages_are_refused():
    with pytest.raises(ValueError, match="no chat template; pass a prompt"):
        BYTE_LEVEL.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, r"\['tool_use'\].*'default'"),
        ({"chat_template": 5}, "chat_template must be text"),
        ({"eos_token": "</nope>"}, "'</nope>'.*is not in tokenizer.json"),
        ({"bos_token": 5}, "bos_token must be text"),
        ({"add_bos_token": True}, "add_bos_token=True"),
        ({"add_bos_token": "yes", "bos_token": "<s>"}, "add_bos_token='yes'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, config, message):
    write(tmp_path, byte_level_backend(), config)
    with pytest.raises(ValueError, match=message):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"model": 5}', '{"model": {"type": "BPE"}}', "nonsense"]
)
def test_a_broken_tokenizer_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path)


def test_a_decoder_that_is_not_by_bytes_is_refused(tmp_path):
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decoder \['WordPiece'\] is not supported"):
        read_tokenizer(write(tmp_path, backend))


def test_a_tokenizer_link_that_leaves_the_directory_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    byte_level_backend().save(str(tmp_path / "outside.json"))
    (tmp_path / "m" / "tokenizer.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ValueError, match="outside the model directory"):
        read_tokenizer(tmp_path / "m")


def test_a_directory_without_tokenizer_has_none(tmp_path):
    assert read_tokenizer(tmp_path) is None


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    tokenizer = read_tokenizer(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("The cat sat on the mat.")) == (
        "The cat sat on the mat."
    )


@pytest.mark.parametrize(("scheme", "strips"), [("always", True), ("never", False)])
def test_metaspace_decoders(tmp_path, scheme, strips):
    backend = sentencepiece_backend()
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = read_tokenizer(write(tmp_path, backend))
    assert tokenizer.strips_first_space is strips
    text = tokenizer.decode([tokenizer._backend.token_to_id("\u2581the")])
    assert text == ("the" if strips else " the")
