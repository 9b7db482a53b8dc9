"""Text to token ids and back.

Owns: `Tokenizer`. In: text, ids, messages. Out: ids,
text, bytes. Must not know: files, weights,
requests.

Decoding is by bytes: every token stands for fixed bytes, the bytes of all tokens are joined, and
what is not UTF-8 becomes U+FFFD. On whole text this equals the tokenizers library; unlike its
decoders it can also run token by token (`text_stream.py`) with the same result.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import tokenizers

from paxserve.models.chat_template import ChatTemplate, Message

Decoding = Literal["byte_level", "sentencepiece"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
        vocab_size: one more than the largest token id.
        special_token_ids: control tokens, left out of text by default.
        bos_token_id: begin token, if there is one.
        eos_token_ids: tokens that end a generation, as far as the tokenizer's own files say;
            `LoadedModel.config` holds the union with the model's.
        strips_first_space: decoded text loses one leading space (SentencePiece adds one).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        decoding: Decoding,
        strips_first_space: bool = False,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Wrap a tokenizer of the tokenizers library; `prefix_ids` and `suffix_ids` are what
        `encode` adds around plain text.
        """
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._decoding = decoding
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._chat_template = chat_template
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.strips_first_space = strips_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text; special tokens written out in it are recognised.
            add_special_tokens: add what the model expects around plain text, usually a begin
                token. A text that already starts with the begin token gets no second one.

        Raises:
            ValueError: the text is no string of Unicode characters.
        """
        try:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"text must be a string of valid Unicode, got {text!r:.80}") from error
        if not add_special_tokens:
            return ids
        has_begin = ids[:1] == [self.bos_token_id] and self._prefix_ids == ids[:1]
        return [*([] if has_begin else self._prefix_ids), *ids, *self._suffix_ids]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Ids that name no token (a model's padded vocabulary) stand for nothing.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        joined = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        text = joined.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty if the id names no token."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._make_bytes(token_id)
        return self._bytes[token_id]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Prompt text of a conversation.

        Raises:
            ValueError: there is no chat template, or it or the messages fail.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template; pass a prompt instead of messages")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; begin and end tokens are the template's alone."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._decoding == "byte_level":
            known = all(char in _BYTE_OF_CHAR for char in token)
            return bytes(_BYTE_OF_CHAR[char] for char in token) if known else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()


def _byte_of_char() -> dict[str, int]:
    """The 256 characters by which byte-level BPE spells bytes.

    Printable Latin-1 stands for itself; the rest, in order, takes the code points from 256 on.
    Source: GPT-2's vocabulary.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
