"""Token ids, one at a time, to text that can be shown at once.

Owns: holding back bytes that are not yet a character and text that may become a stop string. In:
ids. Out: pieces of text. Must not know: requests, sampling.
"""

import codecs
from collections.abc import Sequence

from paxserve.models.tokenizer import Tokenizer


class TextStream:
    """The text of one growing sequence.

    Invariant: without stop strings, the pieces returned so far and by `finish` join to
    `tokenizer.decode` of the ids fed. With them, they join to that text cut at its earliest
    stop: the one that is complete first, and of several complete at the same character the
    longest; those complete within the first `min_tokens` tokens do not count. Otherwise how the
    text is split into tokens changes nothing.

    Attributes:
        matched_stop: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: gives the bytes of a token.
            stop: texts that end the output.
            include_stop: keep the stop string in the output.
            skip_special_tokens: leave control tokens out of the text.
            min_tokens: a stop that is complete within the text of this many tokens is passed over.

        Raises:
            ValueError: a stop string is empty or no text.
        """
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be a list of non-empty texts, got {stop!r:.80}")
        self.matched_stop: str | None = None
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = tokenizer.strips_first_space
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._include_stop = include_stop
        self._num_free_tokens = min_tokens
        self._held = ""

    def feed(self, token_id: int) -> str:
        """Add one token.

        Returns:
            Text that is now certain; empty after a stop string.
        """
        if self.matched_stop is not None:
            return ""
        self._num_free_tokens -= 1
        if token_id in self._skipped:
            return ""
        return self._release(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """End the text.

        Returns:
            What was held back; bytes that never became a character are U+FFFD.
        """
        if self.matched_stop is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.matched_stop is not None else text + held

    def _release(self, text: str) -> str:
        """The part of the held text and `text` that no stop string can take back."""
        if text and self._drops_space:
            text, self._drops_space = text.removeprefix(" "), False
        if not self._matchers:
            return text
        for i, char in enumerate(text):
            complete = [matcher for matcher in self._matchers if matcher.advance(char)]
            if complete and self._num_free_tokens < 0:
                longest = max((matcher.stop for matcher in complete), key=len)
                return self._cut(self._held + text[: i + 1], longest)
            for matcher in complete:
                matcher.pass_over()
        text = self._held + text
        num_safe = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[num_safe:]
        return text[:num_safe]

    def _cut(self, text: str, stop: str) -> str:
        self.matched_stop, self._held = stop, ""
        return text if self._include_stop else text.removesuffix(stop)


class _Matcher:
    """Follows one stop string through the text, one character at a time.

    Invariant: `num_matched` is the length of the longest end of the text that is a beginning of
    the stop. Source: Knuth, Morris and Pratt, SIAM J. Comput. 6 (1977); cost is constant per
    character, amortised, whatever the stop.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = [0] * len(stop)  # next shorter beginning that is also an end
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._shorter[length - 1]
            length += stop[i] == stop[length]
            self._shorter[i] = length

    def advance(self, char: str) -> bool:
        """Take one character; True when the stop is complete."""
        while self.num_matched and char != self.stop[self.num_matched]:
            self.num_matched = self._shorter[self.num_matched - 1]
        self.num_matched += char == self.stop[self.num_matched]
        return self.num_matched == len(self.stop)

    def pass_over(self) -> None:
        """The complete stop does not count: go on with its longest end that is a beginning."""
        self.num_matched = self._shorter[-1]
