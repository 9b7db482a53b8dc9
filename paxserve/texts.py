"""The text of requests, and what of it a stream has been given.

Owns: one `TextStream` per sequence, if the model has a tokenizer. In: requests that got a token or
ended. Out: whole characters, the stop string that ended a request, deltas. Must not know: steps.
"""

from dataclasses import dataclass, field

from paxserve.models.text_stream import TextStream
from paxserve.models.tokenizer import Tokenizer
from paxserve.outputs import Delta
from paxserve.request import FinishReason, Request, Sequence


@dataclass(slots=True)
class _Text:
    """`pieces` join to the text so far; a stream has had the first `num_sent_*`."""

    stream: TextStream | None
    pieces: list[str] = field(default_factory=list)
    num_fed_tokens: int = 0
    num_sent_pieces: int = 0
    num_sent_tokens: int = 0
    is_end_sent: bool = False
    is_complete: bool = False

    def add(self, piece: str) -> None:
        """More text, if there is any."""
        if piece:
            self.pieces.append(piece)


class Texts:
    """Texts by sequence. Beams are rewritten until their request ends, so they are told then."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[Sequence, _Text] = {}

    @property
    def are_read(self) -> bool:
        """Whether there is any text: whether `advance` does anything."""
        return self._tokenizer is not None

    def close(self, request: Request) -> None:
        """Nobody will ask for the text of a request any more."""
        for sequence in request.sequences:
            self._texts.pop(sequence, None)

    def _text(self, request: Request, sequence: Sequence) -> _Text:
        """That of a sequence; a new one, if nobody has asked for it yet."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text(self._stream(request))
        return text

    def _stream(self, request: Request) -> TextStream | None:
        params, stream = request.params, None
        if self._tokenizer is not None:
            stream = TextStream(
                self._tokenizer,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        return stream

    def advance(self, request: Request, sequence: Sequence) -> str | None:
        """Take in a sequence's new tokens, and its end; returns the stop string found, if any."""
        if self._tokenizer is None or _is_open(request, sequence):
            return None
        text = self._text(request, sequence)
        assert text.stream is not None
        for token in sequence.token_ids[request.num_prompt_tokens + text.num_fed_tokens :]:
            text.num_fed_tokens += 1
            if sequence.finish_reason is FinishReason.STOP and token in request.stop_ids:
                break  # an end token is no text, even one that is not special
            text.add(text.stream.feed(token))
        if sequence.finish_reason is not None and not text.is_complete:
            text.add(text.stream.finish())
            text.is_complete = True
        return text.stream.matched_stop

    def text(self, sequence: Sequence) -> str:
        """All of it so far."""
        text = self._texts.get(sequence)
        return "" if text is None else "".join(text.pieces)

    def has_news(self, request: Request, sequence: Sequence) -> bool:
        """Whether there are tokens, or an end, that no delta has brought."""
        if _is_open(request, sequence):
            return False
        text = self._text(request, sequence)
        num_output = len(sequence.token_ids) - request.num_prompt_tokens
        has_ended = sequence.finish_reason is not None
        return text.num_sent_tokens < num_output or (has_ended and not text.is_end_sent)

    def delta(self, request: Request, sequence: Sequence) -> Delta:
        """What came since the last delta."""
        text = self._text(request, sequence)
        new_text = "".join(text.pieces[text.num_sent_pieces :])
        new_tokens = tuple(sequence.token_ids[request.num_prompt_tokens + text.num_sent_tokens :])
        text.num_sent_pieces = len(text.pieces)
        text.num_sent_tokens += len(new_tokens)
        text.is_end_sent = sequence.finish_reason is not None
        return Delta(
            request_id=request.request_id,
            text=new_text,
            token_ids=new_tokens,
            finished=sequence.finish_reason is not None,
            finish_reason=sequence.finish_reason and sequence.finish_reason.value,
            error=request.error,
            index=sequence.index,
        )


def _is_open(request: Request, sequence: Sequence) -> bool:
    """Whether the tokens of a sequence may still be replaced."""
    return request.beams is not None and sequence.finish_reason is None
