"""A tokenizer from the files of a Hugging Face model directory.

Owns: which special tokens surround a text, how tokens spell bytes, where the chat template is.
In: a directory. Out: a `Tokenizer`. Must not know: weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from paxserve.models.chat_template import ChatTemplate
from paxserve.models.model_directory import contained_file, has_file, read_json
from paxserve.models.tokenizer import Decoding, Tokenizer


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of a directory.

    Returns:
        None if the directory has no `tokenizer.json`.

    Raises:
        ValueError: a file is damaged, lies outside the directory, or is not understood.
    """
    if not has_file(directory, "tokenizer.json"):
        return None
    content = read_json(directory, "tokenizer.json")
    path = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is no tokenizer: {error}; fetch it again") from error
    config: dict[str, Any] = {}
    if has_file(directory, "tokenizer_config.json"):
        config = read_json(directory, "tokenizer_config.json")
    try:
        return _from_backend(backend, content, config, _chat_template_text(directory, config))
    except ValueError as error:
        raise ValueError(f"tokenizer in {directory}: {error}") from error


def _from_backend(
    backend: tokenizers.Tokenizer,
    content: Mapping[str, Any],
    config: Mapping[str, Any],
    template: str | None,
) -> Tokenizer:
    backend.no_truncation()
    backend.no_padding()
    decoding, strips = _decoding(content.get("decoder"))
    bos, eos = _token_text(config, "bos_token"), _token_text(config, "eos_token")
    bos_id, eos_id = _id_of(backend, bos), _id_of(backend, eos)
    prefix, suffix = _surroundings(backend)
    return Tokenizer(
        backend,
        decoding=decoding,
        strips_first_space=strips,
        prefix_ids=_adjusted(prefix, bos_id, config, "add_bos_token"),
        suffix_ids=_adjusted(suffix, eos_id, config, "add_eos_token"),
        bos_token_id=bos_id,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_template=None
        if template is None
        else ChatTemplate(template, bos_token=bos, eos_token=eos),
    )


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the library's own post-processor puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise ValueError("its post-processor changes the text's own tokens; it is not supported")


def _adjusted(
    ids: list[int], token_id: int | None, config: Mapping[str, Any], key: str
) -> list[int]:
    """Follow an explicit `add_bos_token` or `add_eos_token`; without one keep `ids`."""
    wanted = config.get(key)
    if wanted is None:
        return ids
    if not isinstance(wanted, bool) or (wanted and token_id is None):
        raise ValueError(f"{key}={wanted!r} must be true or false, and true needs the token")
    if wanted and token_id not in ids:
        return [*ids, token_id] if token_id is not None else ids
    return ids if wanted else [i for i in ids if i != token_id]


def _decoding(decoder: object) -> tuple[Decoding, bool]:
    """How tokens spell bytes, and whether decoding drops one leading space."""
    parts = _decoder_parts(decoder)
    kinds = [part.get("type") for part in parts]
    if "ByteLevel" in kinds:
        return "byte_level", False
    if "Metaspace" in kinds or "ByteFallback" in kinds:
        return "sentencepiece", any(_strips(part) for part in parts)
    raise ValueError(
        f"decoder {kinds} is not supported; byte-level BPE and SentencePiece tokenizers are"
    )


def _decoder_parts(decoder: object) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping):
        return []
    parts = decoder.get("decoders", [decoder])
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []


def _strips(part: Mapping[str, Any]) -> bool:
    if part.get("type") == "Metaspace":
        return bool(part.get("prepend_scheme", "always") != "never")
    return bool(part.get("type") == "Strip" and part.get("start", 0) != 0)


def _chat_template_text(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template file if there is one, else the config's (its `default` if it names several)."""
    if has_file(directory, "chat_template.jinja"):
        return contained_file(directory, "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        if "default" not in named:
            raise ValueError(f"chat_template names {list(named)} but no 'default'")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template must be text, got {type(template).__name__}")
    return template


def _token_text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    value = value.get("content") if isinstance(value, Mapping) else value
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} must be text, got {value!r:.80}")
    return value or ""


def _id_of(backend: tokenizers.Tokenizer, token: str) -> int | None:
    if not token:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise ValueError(f"token {token!r} of tokenizer_config.json is not in tokenizer.json")
    return int(token_id)
