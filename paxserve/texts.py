"""The text of requests, and what of it a stream has been given.

Owns: one `TextStream` per request, if the model has a tokenizer. In: requests that got a token or
ended. Out: whole characters, the stop string that ended a request, deltas. Must not know: steps.
"""

from dataclasses import dataclass, field

from paxserve.models.text_stream import TextStream
from paxserve.models.tokenizer import Tokenizer
from paxserve.outputs import Delta
from paxserve.request import FinishReason, Request


@dataclass(slots=True)
class _Text:
    """`pieces` join to the text so far; a stream has had the first `num_sent_*`."""

    stream: TextStream | None
    pieces: list[str] = field(default_factory=list)
    num_fed_tokens: int = 0
    num_sent_pieces: int = 0
    num_sent_tokens: int = 0
    is_end_sent: bool = False

    def add(self, piece: str) -> None:
        """More text, if there is any."""
        if piece:
            self.pieces.append(piece)


class Texts:
    """Texts by request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[Request, _Text] = {}

    def open(self, request: Request) -> None:
        """A request has begun."""
        params, stream = request.params, None
        if self._tokenizer is not None:
            stream = TextStream(
                self._tokenizer,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        self._texts[request] = _Text(stream)

    def advance(self, request: Request) -> str | None:
        """Take in the request's new tokens, and its end; returns the stop string found, if any."""
        text = self._texts[request]
        if text.stream is None:
            return None
        for token in _output_from(request, text.num_fed_tokens):
            text.num_fed_tokens += 1
            if request.finish_reason is FinishReason.STOP and token in request.stop_ids:
                break  # an end token is no text, even one that is not special
            text.add(text.stream.feed(token))
        if request.finish_reason is not None:
            text.add(text.stream.finish())
        return text.stream.matched_stop

    def text(self, request: Request) -> str:
        """All of it so far."""
        return "".join(self._texts[request].pieces)

    def has_news(self, request: Request) -> bool:
        """Whether there are tokens, or an end, that no delta has brought."""
        text = self._texts[request]
        has_ended = request.finish_reason is not None
        return text.num_sent_tokens < request.num_output_tokens or (
            has_ended and not text.is_end_sent
        )

    def delta(self, request: Request) -> Delta:
        """What came since the last delta."""
        text = self._texts[request]
        new_text = "".join(text.pieces[text.num_sent_pieces :])
        new_tokens = tuple(_output_from(request, text.num_sent_tokens))
        text.num_sent_pieces = len(text.pieces)
        text.num_sent_tokens += len(new_tokens)
        text.is_end_sent = request.finish_reason is not None
        return Delta(
            request_id=request.request_id,
            text=new_text,
            token_ids=new_tokens,
            finished=request.finish_reason is not None,
            finish_reason=request.finish_reason and request.finish_reason.value,
            error=request.error,
        )


def _output_from(request: Request, start: int) -> list[int]:
    """Output tokens from number `start` on."""
    return request.sequence.token_ids[request.num_prompt_tokens + start :]
