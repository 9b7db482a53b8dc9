"""A tokenizer from the metadata of a GGUF file.

Owns: the pre-tokenizers that GGUF names only by a word. In: metadata. Out: a `Tokenizer`. Must
not know: weights, files.

Source: the vocabulary keys of the GGUF specification; the regular expressions are those of the
models' own `tokenizer.json` (SmolLM2, Llama 3, Qwen2).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from paxserve.models.chat_template import ChatTemplate
from paxserve.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4


def _word_pattern(digits: str) -> str:
    """The words of Llama 3 and Qwen2, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


class _Pre(NamedTuple):
    """One value of `tokenizer.ggml.pre`. `pattern` None means GPT-2's own words."""

    pattern: str | None = None
    splits_digits: bool = False
    adds_bos: bool = False
    ignores_merges: bool = False
    composes: bool = False


_LLAMA3 = _Pre(pattern=_word_pattern(r"\p{N}{1,3}"), adds_bos=True, ignores_merges=True)
_PRE_TYPES = {
    "smollm": _Pre(splits_digits=True),
    "gpt-2": _Pre(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Pre(pattern=_word_pattern(r"\p{N}"), composes=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Build the tokenizer that a GGUF file describes.

    Returns:
        None if the file describes none.

    Raises:
        ValueError: a model or pre-tokenizer that is not known, or inconsistent lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    if model != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model={model!r} is not supported, only 'gpt2' (byte-level BPE); "
            "use the safetensors model with its tokenizer.json"
        )
    word = metadata.get("tokenizer.ggml.pre")
    if not isinstance(word, str) or word not in _PRE_TYPES:
        raise ValueError(
            f"tokenizer.ggml.pre={word!r} is not supported; use one of {', '.join(_PRE_TYPES)}"
        )
    pre, tokens = _PRE_TYPES[word], _texts(metadata, "tokens")
    backend = _backend(pre, tokens, _merges(metadata))
    _add_special_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type"))
    bos = _token_id(metadata, "bos_token_id", len(tokens))
    ends = [_token_id(metadata, f"{e}_token_id", len(tokens)) for e in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre.adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return Tokenizer(
        backend,
        decoding="byte_level",
        prefix_ids=[bos] if adds_bos and bos is not None else [],
        suffix_ids=eos[:1] if adds_eos else [],
        bos_token_id=bos,
        eos_token_ids=eos,
        chat_template=_chat_template(metadata, tokens, bos, ends[0]),
    )


def _backend(pre: _Pre, tokens: list[str], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens lists a token twice")
    known = all(a in vocabulary and b in vocabulary and a + b in vocabulary for a, b in merges)
    if not known:
        raise ValueError("tokenizer.ggml.merges joins tokens that tokenizer.ggml.tokens lacks")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignores_merges)
    )
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: object) -> None:
    """Control tokens are special; user-defined ones are whole words that stay in the text."""
    if types is None:
        return
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type must have one entry for each of {len(tokens)} tokens"
        )
    wholes = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens(
        [AddedToken(tokens[i], special=types[i] == _CONTROL, normalized=False) for i in wholes]
    )


def _chat_template(
    metadata: Mapping[str, Any], tokens: list[str], bos: int | None, eos: int | None
) -> ChatTemplate | None:
    template = metadata.get("tokenizer.chat_template")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template must be text, got {type(template).__name__}")
    return ChatTemplate(
        template,
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
    )


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"tokenizer.ggml.{key} must be a list of texts")
    return value


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for line in _texts(metadata, "merges"):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    return merges


def _token_id(metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
        raise ValueError(f"tokenizer.ggml.{key}={value!r} is no id below {num_tokens}")
    return value
